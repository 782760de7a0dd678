#include "apps/bench_op_cases.h"

#include <algorithm>
#include <array>

#include "biomoe/core/rng.h"
#include "biomoe/ops/attention.h"
#include "biomoe/ops/cross_entropy.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/embedding.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"
#include "biomoe/ops/router.h"
#include "biomoe/ops/scaled_swiglu.h"
#include "biomoe/train/run_config.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

void lay_out_arenas(TensorAllocator& allocator, const ParameterList& parameters, OpTensors& at) {
  const int64_t A = parameters.arena_elements();
  for (TensorView* arena_A : {&at.weights_A, &at.gradients_A, &at.exp_avg_A, &at.exp_avg_sq_A}) {
    *arena_A = allocator.tensor(DType::kF32, {A});
  }
}

void lay_out_operands(TensorAllocator& allocator, const ModelConfig& config, const ParameterList& parameters,
                      int64_t tokens, int64_t seq, OpTensors& at) {
  const int64_t N = tokens * config.num_experts_per_tok;
  at.saved = allocate_block_saved(allocator, config, {}, tokens);
  at.saved.x_TD = allocator.tensor(DType::kF32, {tokens, config.hidden_size});
  at.work = allocate_block_workspace(allocator, config, {}, tokens, true);
  at.head = allocate_head_workspace(allocator, Device::kCpu, DType::kF32, config.vocab_size, tokens);
  at.stats = allocate_routing_stats(allocator, 1, config.num_local_experts);
  at.dstream_TD = allocator.tensor(DType::kF32, {tokens, config.hidden_size});
  at.dgate_up_R2F = allocator.tensor(DType::kF32, {N, 2 * config.intermediate_size});
  at.sums_S = allocator.tensor(DType::kF64, {static_cast<int64_t>(parameters.specs().size())});
  at.update_5 = allocator.tensor(DType::kF64, {kNumUpdateValues});
  at.grad_scale_1 = allocator.tensor(DType::kF64, {1});
  at.loss_sums_3 = allocator.tensor(DType::kF64, {3});
  at.losses_2 = allocator.tensor(DType::kF64, {2});
  at.balance_LE = allocator.tensor(DType::kF32, at.stats.counts_LE.shape);
  at.norm_1 = allocator.tensor(DType::kF64, {1});
  at.count_1 = allocator.tensor(DType::kI64, {1});
  at.cos_SK2 = allocator.tensor(DType::kF32, {seq, config.key_width() / 2});
  at.sin_SK2 = allocator.tensor(DType::kF32, {seq, config.key_width() / 2});
}

size_t scratch_bytes(const ModelConfig& config, int64_t tokens, int64_t seq, int threads) {
  const AttentionShape attention = attention_shape(config, seq);
  return std::max(attention_scratch_bytes(Device::kCpu, attention, tokens, threads),
                  rms_norm_backward_scratch_bytes(Device::kCpu, tokens, config.hidden_size));
}

template <typename T>
TensorView view_of(std::vector<T>& values, DType dtype) {
  return TensorView(values.data(), dtype, Shape{static_cast<int64_t>(values.size())});
}

void fill_normal(const TensorView& view, uint32_t substream, double scale) {
  const Rng rng(1, RngStream::kTest, substream);
  float* values = view.f32();
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    values[i] = static_cast<float>(scale * rng.normal(static_cast<uint64_t>(i)));
  }
}

double product_flops(int64_t m, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

double elements(const TensorView& view) {
  return static_cast<double>(view.num_elements());
}

struct Bands {
  TensorView q, k, v;
};
Bands bands_of(const TensorView& qkv_TC, const ModelConfig& config) {
  const int64_t q = config.num_attention_heads * config.key_width();
  const int64_t kv = config.num_key_value_heads * config.key_width();
  return {qkv_TC.columns(0, q), qkv_TC.columns(q, kv), qkv_TC.columns(q + kv, kv)};
}

TensorView flat(const TensorView& view) {
  return TensorView(view.data, view.dtype, Shape{view.num_elements()});
}

}  // namespace

RunMemory OpBench::plan_memory(const BenchOptions& options) {
  options.model.validate();
  const RunConfig config = run_config(options);
  const ModelLimits limits = planned_limits(config, true, Device::kCpu);
  const MemoryRemedies remedies = bench_remedies();
  // Refuses sizes beyond counting.
  const RunMemory step =
      plan_step_memory(options.model, limits, optimizer_options(config, Device::kCpu), remedies);
  const ParameterList parameters(options.model);
  const int64_t tokens = limits.max_tokens;
  OpTensors at;
  const size_t arenas = planned_bytes([&](TensorAllocator& to) { lay_out_arenas(to, parameters, at); });
  const size_t operands = planned_bytes(
      [&](TensorAllocator& to) { lay_out_operands(to, options.model, parameters, tokens, options.seq, at); });
  return {.rows = {{"weights, gradients and moments", arenas, remedies.model},
                   {"other operands", operands, remedies.activations},
                   {"scratch", scratch_bytes(options.model, tokens, options.seq, limits.num_threads),
                    remedies.scratch},
                   {"batches", Batch::planned_bytes(tokens), remedies.batches},
                   step.rows.back()}};
}

OpBench::OpBench(const BenchOptions& options)
    : config_((options.model.validate(), options.model)),
      parameters_(config_),
      batch_(random_batch(options)),
      tokens_(batch_.num_tokens()),
      seq_(options.seq),
      attention_(attention_shape(config_, options.seq)) {
  const auto lay_out = [this](TensorAllocator& allocator) {
    lay_out_arenas(allocator, parameters_, at_);
    lay_out_operands(allocator, config_, parameters_, tokens_, seq_, at_);
  };
  arena_ = Arena(planned_bytes(lay_out), "the operands");
  lay_out(arena_);
  const int threads = resolved_threads(options.num_threads);
  scratch_ = Arena(scratch_bytes(config_, tokens_, seq_, threads), "scratch");
  ctx_.num_threads = threads;
  ctx_.scratch = &scratch_;
  weights_ = block_weights(parameters_, config_, at_.weights_A, 0);
  gradients_ = block_weights(parameters_, config_, at_.gradients_A, 0);
  fill_normal(at_.weights_A, 0, config_.initializer_range);
  fill_normal(at_.gradients_A, 1, 1e-3);
  fill_normal(at_.dstream_TD, 2, 1e-3);
  fill_rope_tables(config_.rope_theta, config_.key_width(), at_.cos_SK2, at_.sin_SK2);
  at_.stats.tokens = tokens_;
  at_.update_5.f64()[kLr] = 1e-5;
  at_.update_5.f64()[kCorrection1] = at_.update_5.f64()[kCorrection2] = 1.0;
  *at_.grad_scale_1.f64() = 1.0 / batch_.target_weight;
  tokens_T_ = view_of(batch_.tokens, DType::kI32);
  targets_T_ = view_of(batch_.targets, DType::kI32);
  loss_weights_T_ = view_of(batch_.loss_weights, DType::kF32);
  positions_T_ = view_of(batch_.positions, DType::kI32);
  cu_seqlens_B1_ = view_of(batch_.cu_seqlens, DType::kI32);
  for (const auto& spec : parameters_.specs()) {
    segments_.push_back({spec.offset, spec.num_elements(), spec.kind != ParamKind::kNorm});
  }
  add_attention_inputs();
  add_attention();
  add_router();
  add_experts();
  add_head();
  add_experts_backward();
  add_attention_backward();
  add_optimizer();
  check_complete();
}

// Every operation is timed, but for those that a step of one CPU in fp32 has none of: between ranks that
// share memory, and of 8-bit recipes.
void OpBench::check_complete() const {
  constexpr std::array<std::string_view, 10> kElsewhere{"peer_plan",
                                                        "send_rows",
                                                        "fetch_rows",
                                                        "zero_padding",
                                                        "quantize",
                                                        "update_delayed_scales",
                                                        "write_mx_weights",
                                                        "turn_mx_weights",
                                                        "scaled_swiglu_codes_forward",
                                                        "scaled_swiglu_codes_backward"};
  const auto check = [&](std::string_view op) {
    const bool timed = std::any_of(cases_.begin(), cases_.end(), [&](const OpCase& c) { return c.op == op; });
    const bool elsewhere = std::find(kElsewhere.begin(), kElsewhere.end(), op) != kElsewhere.end();
    BM_CHECK(timed != elsewhere, "the benchmark of the operation {} is missing", op);
  };
#define BIOMOE_CHECK_OP(name, Args) check(#name);
  BIOMOE_FOR_EACH_OP(BIOMOE_CHECK_OP)
#undef BIOMOE_CHECK_OP
}

void OpBench::add_gemm(std::string what, const GemmArgs& args) {
  const int64_t inner = args.a.shape[args.transpose_a ? 0 : 1];
  const double flops = product_flops(args.c.shape[0], args.c.shape[1], inner);
  const TensorView read = args.accumulate ? args.c : TensorView();
  add("gemm", gemm, std::move(what), flops, {args.a, args.b, read, args.c}, args);
}

void OpBench::add_experts_gemm(std::string_view op, void (*function)(Context&, const GroupedGemmArgs&),
                               std::string what, const GroupedGemmArgs& args) {
  const double flops = product_flops(args.x_RI.shape[0], args.w_EOI.shape[1], args.w_EOI.shape[2]);
  const TensorView read = args.accumulate ? args.w_EOI : TensorView();
  add(op, function, std::move(what), flops, {args.x_RI, args.w_EOI, args.y_RO, read}, args);
}

void OpBench::add_attention_inputs() {
  const BlockSaved& saved = at_.saved;
  const TensorView embedding = parameters_.view(at_.weights_A, parameters_.specs().front());
  const TensorView read = embedding.rows(0, std::min(config_.vocab_size, tokens_));  // at most
  add<EmbeddingForwardArgs>("embedding_forward", embedding_forward, "", 0, {tokens_T_, read, saved.x_TD},
                            {.tokens_T = tokens_T_, .weight_VD = embedding, .y_TD = saved.x_TD});
  add<RmsNormForwardArgs>(
      "rms_norm_forward", rms_norm_forward, "", 6 * elements(saved.x_TD),
      {saved.x_TD, at_.dstream_TD, weights_.norm1_D, saved.mid_TD, saved.norm1_TD, saved.rstd1_T},
      {.x_TD = saved.x_TD,
       .residual_TD = at_.dstream_TD,
       .weight_D = weights_.norm1_D,
       .sum_TD = saved.mid_TD,
       .y_TD = saved.norm1_TD,
       .rstd_T = saved.rstd1_T,
       .eps = config_.rms_norm_eps});
  add_gemm("qkv", {.a = saved.norm1_TD, .b = weights_.qkv_CD, .c = saved.qkv_TC, .transpose_b = true});
  const int64_t rotated = config_.num_attention_heads + config_.num_key_value_heads;
  const TensorView q_and_k = saved.qkv_TC.columns(0, rotated * config_.key_width());
  add<RopeArgs>("rope", rope, "", 3 * elements(q_and_k), {q_and_k, q_and_k, positions_T_},
                {.x_TC = saved.qkv_TC,
                 .positions_T = positions_T_,
                 .cos_SK2 = at_.cos_SK2,
                 .sin_SK2 = at_.sin_SK2,
                 .num_heads = rotated,
                 .head_dim = config_.key_width()});
}

void OpBench::add_attention() {
  const BlockSaved& saved = at_.saved;
  const Bands bands = bands_of(saved.qkv_TC, config_);
  add<AttentionForwardArgs>("attention_forward", attention_forward, "", 2 * attention_product_flops(),
                            {saved.qkv_TC, saved.attn_TA, saved.lse_HT},
                            {.shape = attention_,
                             .q_TC = bands.q,
                             .k_TC = bands.k,
                             .v_TC = bands.v,
                             .cu_seqlens_B1 = cu_seqlens_B1_,
                             .out_TC = saved.attn_TA,
                             .lse_HT = saved.lse_HT});
  const int64_t seen = config_.sliding_window ? std::min(seq_, *config_.sliding_window) : seq_;
  const TensorView q = bands.q.rows(seq_ - 1, 1), k = bands.k.rows(0, seq_), v = bands.v.rows(0, seq_);
  const TensorView out = saved.attn_TA.rows(seq_ - 1, 1);
  add<AttentionDecodeArgs>("attention_decode", attention_decode, fmt::format("1 token, {} keys", seq_),
                           2 * product_flops(1, q.shape[1], seen), {q, k.rows(0, seen), v.rows(0, seen), out},
                           {.shape = attention_, .q_TC = q, .k_PC = k, .v_PC = v, .out_TC = out});
  add_gemm("attention out",
           {.a = saved.attn_TA, .b = weights_.out_DA, .c = at_.work.delta_TD, .transpose_b = true});
}

void OpBench::add_router() {
  const MoeSaved& moe = at_.saved.moe;
  const TensorView logits = at_.work.moe.logits_TE;
  add_gemm("router", {.a = at_.saved.norm1_TD, .b = weights_.moe.gate_ED, .c = logits, .transpose_b = true});
  const int64_t E = config_.num_local_experts;
  // A pass for the maximum, one each for the exponentials, their sum, the quotients and the k largest.
  add<RouterForwardArgs>("router_forward", router_forward, "", 5 * elements(logits),
                         {logits, moe.probs_TE, moe.experts_Tk, moe.weights_Tk, moe.router_lse_T},
                         {.logits_TE = logits,
                          .probs_TE = moe.probs_TE,
                          .experts_Tk = moe.experts_Tk,
                          .weights_Tk = moe.weights_Tk,
                          .lse_T = moe.router_lse_T,
                          .counts_E = TensorView(at_.stats.counts_LE.data, DType::kI64, {E}),
                          .prob_sums_E = TensorView(at_.stats.prob_sums_LE.data, DType::kF64, {E}),
                          .z_sum_1 = at_.stats.z_sums_L});
  add<BalanceLossArgs>("balance_loss", balance_loss, "", 4 * elements(at_.stats.counts_LE),
                       {at_.stats.counts_LE, at_.stats.prob_sums_LE},
                       {.counts_LE = at_.stats.counts_LE,
                        .prob_sums_LE = at_.stats.prob_sums_LE,
                        .z_sums_L = at_.stats.z_sums_L,
                        .tokens = tokens_,
                        .over = BalanceOver::kAllLayers,
                        .balance_coef = 0.02,
                        .losses_2 = at_.losses_2,
                        .balance_LE = at_.balance_LE});
  add<DispatchPlanArgs>("dispatch_plan", dispatch_plan, "", 0,
                        {moe.experts_Tk, moe.row_of_slot_N, moe.slot_of_row_R},
                        {.experts_Tk = moe.experts_Tk,
                         .offsets_E1 = moe.offsets_E1,
                         .rows_E = moe.rows_E,
                         .row_of_slot_N = moe.row_of_slot_N,
                         .slot_of_row_R = moe.slot_of_row_R});
}

void OpBench::add_experts() {
  const MoeSaved& moe = at_.saved.moe;
  const MoeWorkspace& work = at_.work.moe;
  const TensorView x = at_.saved.norm1_TD;
  add<PermuteArgs>("permute", permute, "", 0,
                   {x, moe.slot_of_row_R, work.x_RD, moe.weights_Tk, moe.row_weights_R},
                   {.x_TD = x,
                    .slot_of_row_R = moe.slot_of_row_R,
                    .y_RD = work.x_RD,
                    .values_N = flat(moe.weights_Tk),
                    .y_values_R = moe.row_weights_R,
                    .top_k = config_.num_experts_per_tok});
  add_experts_gemm("grouped_gemm_forward", grouped_gemm_forward, "gate and up",
                   {.x_RI = work.x_RD,
                    .w_EOI = weights_.moe.gate_up_E2FD,
                    .y_RO = moe.gate_up_R2F,
                    .offsets_E1 = moe.offsets_E1});
  add<ScaledSwigluForwardArgs>(
      "scaled_swiglu_forward", scaled_swiglu_forward, "", 6 * elements(moe.act_RF),
      {moe.gate_up_R2F, moe.row_weights_R, moe.act_RF},
      {.gate_up_R2F = moe.gate_up_R2F, .probs_R = moe.row_weights_R, .act_RF = moe.act_RF});
  const double gate_up_flops =
      product_flops(work.x_RD.shape[0], moe.gate_up_R2F.shape[1], work.x_RD.shape[1]);
  add<GroupedGateUpArgs>("grouped_gate_up", grouped_gate_up, "", gate_up_flops + 6 * elements(moe.act_RF),
                         {work.x_RD, weights_.moe.gate_up_E2FD, moe.gate_up_R2F, moe.act_RF},
                         {.x_RD = work.x_RD,
                          .w_E2FD = weights_.moe.gate_up_E2FD,
                          .gate_up_R2F = moe.gate_up_R2F,
                          .probs_R = moe.row_weights_R,
                          .act_RF = moe.act_RF,
                          .offsets_E1 = moe.offsets_E1,
                          .rows_E = moe.rows_E});
  add_experts_gemm(
      "grouped_gemm_forward", grouped_gemm_forward, "down",
      {.x_RI = moe.act_RF, .w_EOI = weights_.moe.down_EDF, .y_RO = work.y_RD, .offsets_E1 = moe.offsets_E1});
  add<UnpermuteArgs>("unpermute", unpermute, "", elements(work.y_RD),
                     {work.y_RD, moe.row_of_slot_N, at_.work.delta_TD},
                     {.y_RD = work.y_RD,
                      .row_of_slot_N = moe.row_of_slot_N,
                      .x_TD = at_.work.delta_TD,
                      .y_values_R = {},
                      .values_N = {},
                      .top_k = config_.num_experts_per_tok});
}

// One chunk of rows, as the model runs it.
void OpBench::add_head() {
  const TensorView logits = at_.head.logits_CV;
  const int64_t rows = logits.shape[0];
  const TensorView head = parameters_.view(at_.weights_A, parameters_.specs().front());
  add_gemm("head", {.a = at_.saved.norm1_TD.rows(0, rows), .b = head, .c = logits, .transpose_b = true});
  add<CrossEntropyArgs>("cross_entropy", cross_entropy, "with gradient", 6 * elements(logits),
                        {logits, logits},
                        {.logits_TV = logits,
                         .targets_T = targets_T_.rows(0, rows),
                         .weights_T = loss_weights_T_.rows(0, rows),
                         .nll_T = at_.head.nll_T.rows(0, rows),
                         .grad_scale_1 = at_.grad_scale_1,
                         .write_gradient = true});
  add<LossSumsArgs>("loss_sums", loss_sums, "", 3 * static_cast<double>(tokens_),
                    {at_.head.nll_T, loss_weights_T_},
                    {.nll_T = at_.head.nll_T, .weights_T = loss_weights_T_, .sums_3 = at_.loss_sums_3});
}

void OpBench::add_experts_backward() {
  const MoeSaved& moe = at_.saved.moe;
  const MoeWorkspace& work = at_.work.moe;
  const GroupedGemmArgs down{
      .x_RI = work.dact_RF, .w_EOI = weights_.moe.down_EDF, .y_RO = work.y_RD, .offsets_E1 = moe.offsets_E1};
  add_experts_gemm("grouped_gemm_dgrad", grouped_gemm_dgrad, "down", down);
  // Not in place, as the model has it: run again and again on its own result it would end in subnormals.
  add<ScaledSwigluBackwardArgs>(
      "scaled_swiglu_backward", scaled_swiglu_backward, "", 14 * elements(moe.act_RF),
      {work.dact_RF, moe.gate_up_R2F, moe.row_weights_R, at_.dgate_up_R2F, work.dprobs_R},
      {.dact_RF = work.dact_RF,
       .gate_up_R2F = moe.gate_up_R2F,
       .probs_R = moe.row_weights_R,
       .dgate_up_R2F = at_.dgate_up_R2F,
       .dprobs_R = work.dprobs_R});
  const double down_flops = product_flops(work.y_RD.shape[0], moe.act_RF.shape[1], work.y_RD.shape[1]);
  add<GroupedDownBackwardArgs>("grouped_down_backward", grouped_down_backward, "",
                               down_flops + 14 * elements(moe.act_RF),
                               {work.y_RD, weights_.moe.down_EDF, moe.gate_up_R2F, at_.dgate_up_R2F},
                               {.dy_RD = work.y_RD,
                                .w_EDF = weights_.moe.down_EDF,
                                .gate_up_R2F = moe.gate_up_R2F,
                                .probs_R = moe.row_weights_R,
                                .dact_RF = work.dact_RF,
                                .dgate_up_R2F = at_.dgate_up_R2F,
                                .dprobs_R = work.dprobs_R,
                                .offsets_E1 = moe.offsets_E1,
                                .rows_E = moe.rows_E});
  const GroupedGemmArgs gate_up{.x_RI = work.x_RD,
                                .w_EOI = gradients_.moe.gate_up_E2FD,
                                .y_RO = at_.dgate_up_R2F,
                                .offsets_E1 = moe.offsets_E1};
  add_experts_gemm("grouped_gemm_wgrad", grouped_gemm_wgrad, "gate and up", gate_up);
  const TensorView dprobs = at_.work.moe.dweights_Tk;
  add<UnpermuteArgs>("unpermute", unpermute, "with weights", elements(work.y_RD),
                     {work.y_RD, moe.row_of_slot_N, at_.work.dnorm_TD, dprobs, dprobs},
                     {.y_RD = work.y_RD,
                      .row_of_slot_N = moe.row_of_slot_N,
                      .x_TD = at_.work.dnorm_TD,
                      .y_values_R = work.dprobs_R,
                      .values_N = flat(dprobs),
                      .top_k = config_.num_experts_per_tok});
  add<RouterBackwardArgs>("router_backward", router_backward, "", 6 * elements(moe.probs_TE),
                          {moe.probs_TE, moe.experts_Tk, moe.weights_Tk, dprobs, work.logits_TE},
                          {.probs_TE = moe.probs_TE,
                           .experts_Tk = moe.experts_Tk,
                           .weights_Tk = moe.weights_Tk,
                           .lse_T = moe.router_lse_T,
                           .dweights_Tk = dprobs,
                           .balance_E = {},
                           .z_scale = 1e-3,
                           .dlogits_TE = work.logits_TE});
}

void OpBench::add_attention_backward() {
  const BlockSaved& saved = at_.saved;
  const BlockWorkspace& work = at_.work;
  add<RmsNormBackwardArgs>("rms_norm_backward", rms_norm_backward, "", 12 * elements(saved.mid_TD),
                           {work.dnorm_TD, saved.mid_TD, weights_.norm1_D, at_.dstream_TD, work.delta_TD},
                           {.dy_TD = work.dnorm_TD,
                            .sum_TD = saved.mid_TD,
                            .weight_D = weights_.norm1_D,
                            .rstd_T = saved.rstd1_T,
                            .dresidual_TD = at_.dstream_TD,
                            .dx_TD = work.delta_TD,
                            .dweight_D = gradients_.norm1_D});
  add_gemm("attention out, dgrad", {.a = work.delta_TD, .b = weights_.out_DA, .c = work.dattn_TA});
  add_gemm("attention out, wgrad", {.a = work.delta_TD,
                                    .b = saved.attn_TA,
                                    .c = gradients_.out_DA,
                                    .transpose_a = true,
                                    .accumulate = true});
  const Bands bands = bands_of(saved.qkv_TC, config_), dbands = bands_of(work.dqkv_TC, config_);
  // Scores once more, then the gradients of probabilities, values, keys and queries.
  add<AttentionBackwardArgs>("attention_backward", attention_backward, "", 5 * attention_product_flops(),
                             {saved.qkv_TC, saved.attn_TA, work.dattn_TA, saved.lse_HT, work.dqkv_TC},
                             {.shape = attention_,
                              .q_TC = bands.q,
                              .k_TC = bands.k,
                              .v_TC = bands.v,
                              .cu_seqlens_B1 = cu_seqlens_B1_,
                              .out_TC = saved.attn_TA,
                              .lse_HT = saved.lse_HT,
                              .dout_TC = work.dattn_TA,
                              .dq_TC = dbands.q,
                              .dk_TC = dbands.k,
                              .dv_TC = dbands.v});
  const TensorView dembedding = parameters_.view(at_.gradients_A, parameters_.specs().front());
  const TensorView updated = dembedding.rows(0, std::min(config_.vocab_size, tokens_));  // at most
  add<EmbeddingBackwardArgs>("embedding_backward", embedding_backward, "", elements(at_.dstream_TD),
                             {tokens_T_, at_.dstream_TD, updated, updated},
                             {.tokens_T = tokens_T_, .dy_TD = at_.dstream_TD, .dweight_VD = dembedding});
}

void OpBench::add_optimizer() {
  const TensorView w = at_.weights_A, g = at_.gradients_A, m = at_.exp_avg_A, v = at_.exp_avg_sq_A;
  add<SumSquaresArgs>("sum_squares", sum_squares, "", 2 * elements(g), {g},
                      {.x_A = g, .segments = segments_, .sums_S = at_.sums_S});
  const TensorView update = at_.update_5;
  add<ClipFactorArgs>("clip_factor", clip_factor, "", elements(at_.sums_S), {at_.sums_S},
                      {.sums_S = at_.sums_S,
                       .max_norm = 1.0,
                       .norm_1 = at_.norm_1,
                       .factor_1 = update.rows(kGradScale, 1),
                       .apply_1 = update.rows(kApply, 1)});
  add<AdamwArgs>("adamw", adamw, "", 16 * elements(w), {w, w, g, m, m, v, v},
                 {.weights_A = w,
                  .grad_A = g,
                  .exp_avg_A = m,
                  .exp_avg_sq_A = v,
                  .segments = segments_,
                  .weight_decay = 0.1,
                  .update_5 = at_.update_5});
  add<FillZeroArgs>("fill_zero", fill_zero, "a gradient", 0, {gradients_.moe.down_EDF},
                    {.x = gradients_.moe.down_EDF});
  add<CountNonfiniteArgs>("count_nonfinite", count_nonfinite, "", elements(at_.saved.x_TD), {at_.saved.x_TD},
                          {.x = at_.saved.x_TD, .count_1 = at_.count_1});
}

// 2 K operations for each head, query and key that it sees.
double OpBench::attention_product_flops() const {
  double pairs = 0;
  for (int64_t query = 0; query < seq_; ++query) {
    const int64_t seen = query + 1;
    pairs += static_cast<double>(config_.sliding_window ? std::min(seen, *config_.sliding_window) : seen);
  }
  const double sequences = static_cast<double>(tokens_ / seq_);
  return 2.0 * pairs * sequences * static_cast<double>(config_.num_attention_heads * config_.key_width());
}

}  // namespace biomoe::apps
