// Import and export of weights in the layouts of transformers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "biomoe/checkpoint/checkpoint_summary.h"
#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/hf_export.h"
#include "biomoe/checkpoint/hf_import.h"
#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::error_of;
using testing::expect_error;
using testing::random_floats;
using testing::small_model;
using testing::TempFolder;
using testing::write_bytes;

constexpr float kUntouched = 1234.5f;

// The parameters of a model with random values; gaps between them hold kUntouched.
struct Weights {
  explicit Weights(const ModelConfig& model, uint64_t seed = 3)
      : config(model),
        parameters(model),
        arena(static_cast<size_t>(parameters.arena_elements()), kUntouched) {
    for (const auto& spec : parameters.specs()) {
      const auto values = random_floats(spec.num_elements(), seed + static_cast<uint64_t>(spec.offset));
      std::copy(values.begin(), values.end(), arena.begin() + spec.offset);
    }
  }
  std::vector<float> round_to(DType dtype) const {
    std::vector<float> rounded = arena;
    std::vector<uint8_t> bytes(4);
    for (const auto& spec : parameters.specs()) {
      for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
        float& value = rounded[static_cast<size_t>(i)];
        EXPECT_FALSE(convert_from_f32(dtype, &value, bytes.data(), 1));
        convert_to_f32(dtype, bytes.data(), &value, 1);
      }
    }
    return rounded;
  }
  ModelConfig config;
  ParameterList parameters;
  std::vector<float> arena;
};

std::vector<float> import_all(const fs::path& folder, HfImportReport* report = nullptr) {
  const HfConfig config = read_hf_config(folder);
  const ParameterList parameters(config.model);
  std::vector<float> arena(static_cast<size_t>(parameters.arena_elements()), kUntouched);
  const HfImportReport made = import_hf(folder, config.model, parameters, arena.data());
  if (report) *report = made;
  return arena;
}

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A checkpoint under construction: any names, shapes and types, written as one file with a configuration.
struct HandMade {
  struct Tensor {
    DType dtype;
    Shape shape;
    std::vector<float> values;
  };
  std::map<std::string, Tensor> tensors;
  ModelConfig config;

  HandMade(const Weights& weights, HfLayout layout, std::string_view prefix = "model.")
      : config(weights.config) {
    for (const auto& piece : hf_pieces(weights.parameters, layout, prefix)) {
      const float* data = weights.arena.data() + piece.offset;
      tensors[piece.name] = {DType::kF32, piece.shape, {data, data + piece.shape.num_elements()}};
    }
  }
  void write(const fs::path& folder) const {
    for (const auto& entry : fs::directory_iterator(folder)) fs::remove_all(entry);
    std::vector<TensorSpec> specs;
    std::vector<const Tensor*> sources;
    for (DType dtype : {DType::kF32, DType::kI32, DType::kBF16, DType::kF16}) {  // wide types first: aligned
      for (const auto& [name, tensor] : tensors) {
        if (tensor.dtype != dtype) continue;
        specs.push_back({name, dtype, tensor.shape});
        sources.push_back(&tensor);
      }
    }
    write_tensors(folder, specs,
                  [&](size_t i, SafetensorsWriter& writer) {
                    std::vector<uint8_t> bytes(specs[i].bytes());
                    if (is_float_type(specs[i].dtype)) {
                      convert_from_f32(specs[i].dtype, sources[i]->values.data(), bytes.data(),
                                       sources[i]->values.size());
                    }
                    writer.write(bytes.data(), bytes.size());
                  },
                  {});
    write_bytes(folder / "config.json", hf_config_json(config, {}, DType::kF32).dump());
  }
};

void expect_refused(const HandMade& checkpoint, const std::string& what) {
  const TempFolder folder;
  checkpoint.write(folder.path());
  const ParameterList parameters(checkpoint.config);
  std::vector<float> arena(static_cast<size_t>(parameters.arena_elements()), kUntouched);
  expect_error([&] { import_hf(folder.path(), checkpoint.config, parameters, arena.data()); }, what);
  EXPECT_TRUE(std::all_of(arena.begin(), arena.end(), [](float v) { return v == kUntouched; }))
      << "something was loaded";
  EXPECT_FALSE(verify_any_checkpoint(folder.path())["ok"].get<bool>());
}

// Ranks that split the experts: of all dense weights everything, of the experts their own, nothing else.
TEST(HfImport, ARankReadsWhatItHolds) {
  ModelConfig model = small_model();
  model.num_local_experts = 4;
  const Weights weights(model);
  for (const HfLayout layout : {HfLayout::kHub, HfLayout::kInMemory}) {
    const TempFolder folder;
    HandMade(weights, layout).write(folder.path());
    for (const MeshSize size : {MeshSize{1, 2}, MeshSize{2, 2}, MeshSize{1, 4}}) {
      for (int64_t rank = 0; rank < size.world(); ++rank) {
        const ParameterList held(model, {.size = size, .dp_rank = rank / size.ep, .ep_rank = rank % size.ep});
        std::vector<float> arena(static_cast<size_t>(held.arena_elements()), kUntouched);
        import_hf(folder.path(), model, held, arena.data());
        std::vector<float> want(arena.size(), kUntouched);
        for (const ParamSpec& spec : held.specs()) {
          const ParamSpec& whole = weights.parameters.find(spec.name);
          ASSERT_EQ(spec.num_elements() * spec.parts, whole.num_elements()) << spec.name;
          const int64_t first =
              whole.offset + whole.num_elements() / spec.parts * (spec.parts > 1 ? rank % size.ep : 0);
          std::copy_n(weights.arena.begin() + first, spec.num_elements(), want.begin() + spec.offset);
        }
        EXPECT_TRUE(equal_bits(arena, want)) << hf_layout_name(layout) << ", rank " << rank;
      }
    }
  }
}

TEST(HfRoundTrip, EveryTypeShardedTiedOrNot) {
  for (const bool tied : {false, true}) {
    ModelConfig model = small_model();
    model.tie_word_embeddings = tied;
    model.head_dim = 6;
    const Weights weights(model);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const uint64_t shard : {uint64_t{1} << 40, uint64_t{1000}, uint64_t{1}}) {
        if (shard == 1 && dtype != DType::kF32) continue;  // a file for every tensor: once will do
        const TempFolder folder;
        const HfExportReport exported =
            export_hf(folder / "out", model, weights.parameters, weights.arena.data(),
                      {.dtype = dtype, .max_shard_bytes = shard, .tokens = {1, {2}, 0}});
        HfImportReport imported;
        const std::vector<float> first = import_all(folder / "out", &imported);
        EXPECT_TRUE(equal_bits(first, weights.round_to(dtype))) << dtype_name(dtype) << " tied " << tied;
        EXPECT_EQ(imported.files == 1, shard > 1000);
        EXPECT_EQ(imported.tensors, exported.tensors);
        EXPECT_EQ(imported.layout, HfLayout::kHub);
        EXPECT_TRUE(imported.notes.empty());
        EXPECT_EQ(TensorFolder(folder / "out").find("lm_head.weight") ? false : true, tied);
        EXPECT_TRUE(read_hf_config(folder / "out").notes.empty());
        const json verified = verify_any_checkpoint(folder / "out");
        EXPECT_TRUE(verified["ok"].get<bool>()) << verified.dump();

        if (shard != 1000) continue;
        // Exported once more it is the same, byte for byte.
        export_hf(folder / "again", model, weights.parameters, first.data(),
                  {.dtype = dtype, .max_shard_bytes = shard, .tokens = {1, {2}, 0}});
        int64_t files = 0;
        for (const auto& entry : fs::directory_iterator(folder / "out")) {
          const std::string name = entry.path().filename().string();
          EXPECT_EQ(testing::read_bytes(entry.path()), testing::read_bytes(folder / "again" / name)) << name;
          ++files;
        }
        EXPECT_EQ(files, exported.files);
      }
    }
  }
}

TEST(HfImport, BothLayoutsGiveTheSameArena) {
  const Weights weights(small_model());
  for (const HfLayout layout : {HfLayout::kHub, HfLayout::kInMemory}) {
    for (const char* prefix : {"model.", ""}) {
      const TempFolder folder;
      HandMade(weights, layout, prefix).write(folder.path());
      HfImportReport report;
      EXPECT_TRUE(equal_bits(import_all(folder.path(), &report), weights.arena))
          << hf_layout_name(layout) << prefix;
      EXPECT_EQ(report.layout, layout);
      EXPECT_EQ(report.notes.size(), *prefix ? 0u : 1u);
    }
  }
}

// The places of the experts' three matrices, written out: w1 is the first half of gate_up_proj's rows, w3 the
// second.
TEST(HfImport, GateRowsComeFirst) {
  const ModelConfig model = small_model();
  const Weights weights(model);
  const int64_t D = model.hidden_size, F = model.intermediate_size;
  const HandMade hub(weights, HfLayout::kHub);
  const float* gate_up =
      weights.arena.data() + weights.parameters.find("model.layers.1.mlp.experts.gate_up_proj").offset;
  const float* down =
      weights.arena.data() + weights.parameters.find("model.layers.1.mlp.experts.down_proj").offset;
  const auto expert = [&](const char* name) {
    return hub.tensors.at(std::string("model.layers.1.block_sparse_moe.experts.2.") + name);
  };
  EXPECT_EQ(expert("w1.weight").shape, (Shape{F, D}));
  EXPECT_EQ(expert("w3.weight").shape, (Shape{F, D}));
  EXPECT_EQ(expert("w2.weight").shape, (Shape{D, F}));
  for (int64_t row : {int64_t{0}, F - 1}) {
    const auto at = static_cast<size_t>(row * D + 3);
    EXPECT_EQ(expert("w1.weight").values[at], gate_up[(2 * 2 * F + row) * D + 3]);
    EXPECT_EQ(expert("w3.weight").values[at], gate_up[(2 * 2 * F + F + row) * D + 3]);
  }
  EXPECT_EQ(expert("w2.weight").values[static_cast<size_t>(5 * F + 7)], down[(2 * D + 5) * F + 7]);
  EXPECT_TRUE(hub.tensors.count("model.layers.0.block_sparse_moe.gate.weight"));
}

TEST(HfImport, PiecesCoverEveryParameterOnce) {
  ModelConfig model = small_model();
  for (const bool tied : {false, true}) {
    model.tie_word_embeddings = tied;
    const ParameterList parameters(model);
    for (const HfLayout layout : {HfLayout::kHub, HfLayout::kInMemory}) {
      std::vector<int> uses(static_cast<size_t>(parameters.arena_elements()));
      for (const auto& piece : hf_pieces(parameters, layout)) {
        for (int64_t i = 0; i < piece.shape.num_elements(); ++i)
          ++uses[static_cast<size_t>(piece.offset + i)];
      }
      int64_t used = 0;
      for (const auto& spec : parameters.specs()) {
        for (int64_t i = 0; i < spec.num_elements(); ++i)
          EXPECT_EQ(uses[static_cast<size_t>(spec.offset + i)], 1);
        used += spec.num_elements();
      }
      EXPECT_EQ(std::count_if(uses.begin(), uses.end(), [](int n) { return n != 0; }), used);
    }
  }
}

TEST(HfImport, GoldensAreReadInFull) {
  const fs::path goldens = fs::path(BIOMOE_TEST_DATA) / "goldens/hf";
  for (const char* name : {"base", "sharded_bf16", "top1_tied_window"}) {
    HfImportReport report;
    const std::vector<float> arena = import_all(goldens / name, &report);
    const HfConfig config = read_hf_config(goldens / name);
    const ParameterList parameters(config.model);
    const TensorFolder folder(goldens / name);
    EXPECT_EQ(report.tensors, static_cast<int64_t>(folder.tensors().size()));
    for (const auto& piece : hf_pieces(parameters, HfLayout::kHub)) {
      const auto place = folder.find(piece.name);
      ASSERT_TRUE(place) << piece.name;
      std::vector<float> values(static_cast<size_t>(piece.shape.num_elements()));
      place.file->read_f32(*place.entry, values.data());
      EXPECT_EQ(std::memcmp(values.data(), arena.data() + piece.offset, values.size() * 4), 0) << piece.name;
    }
    EXPECT_TRUE(verify_any_checkpoint(goldens / name)["ok"].get<bool>());
  }
}

TEST(HfImport, TypesMayBeMixedInOneFile) {
  const Weights weights(small_model());
  HandMade checkpoint(weights, HfLayout::kInMemory);
  checkpoint.tensors["model.layers.0.mlp.gate.weight"].dtype = DType::kBF16;
  checkpoint.tensors["model.norm.weight"].dtype = DType::kF16;
  const TempFolder folder;
  checkpoint.write(folder.path());
  const std::vector<float> arena = import_all(folder.path());
  const auto& gate = weights.parameters.find("model.layers.0.mlp.gate.weight");
  const auto at = static_cast<size_t>(gate.offset);
  EXPECT_EQ(arena[at], float_from_bf16(bf16_from_float(weights.arena[at])));
  EXPECT_NE(arena[at], weights.arena[at]);
}

TEST(HfImport, EveryTensorIsAccountedFor) {
  const Weights weights(small_model());
  for (const HfLayout layout : {HfLayout::kHub, HfLayout::kInMemory}) {
    const HandMade good(weights, layout);
    for (const auto& [name, tensor] : good.tensors) {
      HandMade bad = good;
      bad.tensors.erase(name);
      expect_refused(bad, "1 tensors that config.json asks for are missing: '" + name + "'");
    }
    HandMade bad = good;
    bad.tensors["model.layers.2.input_layernorm.weight"] = good.tensors.at("model.norm.weight");
    expect_refused(bad,
                   "1 tensors have no place in the model that config.json describes: 'model.layers.2.input");
    bad = good;
    bad.tensors["model.norm.weight"] = {DType::kF32, {4}, {1, 2, 3, 4}};
    expect_refused(bad, "tensor 'model.norm.weight' is [4], config.json makes it [8]");
    bad = good;
    bad.tensors["model.norm.weight"].shape = {1, 8};
    expect_refused(bad, "is [1, 8], config.json makes it [8]");
    bad = good;
    bad.tensors["model.norm.weight"].dtype = DType::kI32;
    expect_refused(bad, "tensor 'model.norm.weight' is I32; weights are");
    bad = good;
    bad.config.num_hidden_layers = 1;
    expect_refused(bad, "have no place");
    bad.config.num_hidden_layers = 3;
    expect_refused(bad, "are missing");
    bad = good;
    bad.config.num_local_experts = 4;
    expect_refused(bad, "config.json makes it [4, ");
  }
}

TEST(HfImport, LongListsAreCutShort) {
  const Weights weights(small_model());
  HandMade bad(weights, HfLayout::kHub);
  for (int i = 0; i < 500; ++i) bad.tensors["extra." + std::to_string(i)] = {DType::kF32, {1}, {0}};
  expect_refused(bad, "and 496 more");
}

TEST(HfImport, TheExpertMatricesMustNotBeTransposed) {
  const Weights weights(small_model());
  HandMade bad(weights, HfLayout::kInMemory);
  bad.tensors["model.layers.0.mlp.experts.gate_up_proj"].shape = {3, 8, 24};
  expect_refused(bad, "is [3, 8, 24], config.json makes it [3, 24, 8]");
}

TEST(HfImport, RefusesMixedLayouts) {
  const Weights weights(small_model());
  HandMade mixed(weights, HfLayout::kHub);
  const HandMade other(weights, HfLayout::kInMemory);
  for (const auto& [name, tensor] : other.tensors) {
    if (name.find("layers.1.mlp") != std::string::npos) mixed.tensors[name] = tensor;
  }
  expect_refused(mixed, "mixes two layouts");
  for (auto it = mixed.tensors.begin(); it != mixed.tensors.end();) {
    it = it->first.find("layers.1.block_sparse_moe") != std::string::npos ? mixed.tensors.erase(it)
                                                                          : std::next(it);
  }
  expect_refused(mixed, "mixes two layouts");
  HandMade none(weights, HfLayout::kHub);
  for (auto it = none.tensors.begin(); it != none.tensors.end();) {
    it = it->first.find("block_sparse_moe") != std::string::npos ? none.tensors.erase(it) : std::next(it);
  }
  expect_refused(none, "not a Mixtral checkpoint");
}

TEST(HfImport, TiedEmbeddingsComeOnceOrTwice) {
  ModelConfig model = small_model();
  model.tie_word_embeddings = true;
  const Weights weights(model);
  const HandMade once(weights, HfLayout::kHub);
  const TempFolder folder;
  HandMade twice = once;
  twice.tensors["lm_head.weight"] = twice.tensors.at("model.embed_tokens.weight");
  twice.write(folder.path());
  EXPECT_TRUE(equal_bits(import_all(folder.path()), weights.arena));
  HandMade different = twice;
  different.tensors["lm_head.weight"].values[100] += 1e-3f;
  expect_refused(different, "lm_head.weight differs from model.embed_tokens.weight");
  different.tensors["lm_head.weight"] = {DType::kF32, {8}, std::vector<float>(8)};
  expect_refused(different, "tensor 'lm_head.weight' is [8]");
  HandMade head_only = twice;
  head_only.tensors.erase("model.embed_tokens.weight");
  head_only.write(folder.path());
  HfImportReport report;
  EXPECT_TRUE(equal_bits(import_all(folder.path(), &report), weights.arena));
  ASSERT_EQ(report.notes.size(), 1u);
  EXPECT_NE(report.notes[0].find("read from lm_head.weight"), std::string::npos);
}

TEST(HfImport, KnownBuffersArePassedOverAndSaid) {
  const Weights weights(small_model());
  HandMade checkpoint(weights, HfLayout::kHub);
  checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {DType::kF32, {2}, {1, 2}};
  const TempFolder folder;
  checkpoint.write(folder.path());
  HfImportReport report;
  EXPECT_TRUE(equal_bits(import_all(folder.path(), &report), weights.arena));
  ASSERT_EQ(report.notes.size(), 1u);
  EXPECT_NE(report.notes[0].find("rotary_emb.inv_freq"), std::string::npos);
}

TEST(HfExport, OverflowNamesTheTensor) {
  Weights weights(small_model());
  const TempFolder folder;
  const auto& spec = weights.parameters.find("model.layers.1.mlp.experts.gate_up_proj");
  const auto at = static_cast<size_t>(spec.offset + 7);
  weights.arena[at] = 65520.0f;  // the first value that rounds to infinity in F16
  const auto run = [&](DType dtype) {
    export_hf(folder / "out", weights.config, weights.parameters, weights.arena.data(),
              {.dtype = dtype, .overwrite = true});
  };
  expect_error([&] { run(DType::kF16); },
               "tensor model.layers.1.block_sparse_moe.experts.0.w1.weight: the value 65520 at element 7 is "
               "too large for F16");
  EXPECT_TRUE(fs::is_empty(folder.path()));
  weights.arena[at] = -65519.0f;
  run(DType::kF16);
  weights.arena[at] = std::numeric_limits<float>::max();
  expect_error([&] { run(DType::kBF16); }, "is too large for BF16");
  weights.arena[at] = -std::numeric_limits<float>::infinity();  // not made by the conversion
  run(DType::kF16);
  EXPECT_EQ(import_all(folder / "out")[at], weights.arena[at]);
  const json verified = verify_any_checkpoint(folder / "out");
  EXPECT_NE(verified["problems"].dump().find("holds 1 values that are not finite"), std::string::npos);
}

TEST(HfExport, NeverReplacesWhatIsNotAnExport) {
  const Weights weights(small_model());
  const TempFolder folder;
  const auto run = [&](bool overwrite) {
    export_hf(folder / "out", weights.config, weights.parameters, weights.arena.data(),
              {.max_shard_bytes = 1000, .overwrite = overwrite, .extra_files = {{"tokenizer.json", "{}"}}});
  };
  fs::create_directory(folder / "out");
  run(false);  // empty is as good as absent
  EXPECT_EQ(testing::read_bytes(folder / "out/tokenizer.json"), "{}");
  expect_error([&] { run(false); }, "the folder is not empty");
  run(true);
  for (const char* name :
       {"thesis.tex", "README.md", "special_tokens_map.json", "model-00001-of-00099.safetensors"}) {
    write_bytes(folder / "out" / name, "x");
    expect_error([&] { run(true); }, fmt::format("holds '{}', which no export wrote", name));
    EXPECT_EQ(testing::read_bytes(folder / "out" / name), "x");
    fs::remove(folder / "out" / name);
  }
  run(true);
  for (const char* text : {"{\"model_type\": \"mixtral\"}", "[]", "{"}) {
    write_bytes(folder / "out/config.json", text);
    expect_error([&] { run(true); }, "holds no export of biomoe");
    EXPECT_EQ(testing::read_bytes(folder / "out/config.json"), text);
  }
  fs::remove_all(folder / "out");
  write_bytes(folder / "out", "a file");
  expect_error([&] { run(true); }, "is not a folder");
  fs::remove(folder / "out");
  export_hf(folder / "new/deep/out/", weights.config, weights.parameters, weights.arena.data());
  EXPECT_TRUE(fs::exists(folder / "new/deep/out/model.safetensors"));
  int64_t entries = 0;
  for (const auto& entry : fs::directory_iterator(folder / "new/deep")) entries += entry.exists();
  EXPECT_EQ(entries, 1);
}

TEST(HfExport, LeftoversOfADeadExportAreCleared) {
  const Weights weights(small_model());
  const TempFolder folder;
  fs::create_directory(folder / ".out.partial-1-0");
  fs::create_directory(folder / ".other.partial-1-0");
  export_hf(folder / "out", weights.config, weights.parameters, weights.arena.data());
  EXPECT_FALSE(fs::exists(folder / ".out.partial-1-0"));
  EXPECT_TRUE(fs::exists(folder / ".other.partial-1-0"));
}

TEST(ByteSize, ReadsWhatTransformersReads) {
  EXPECT_EQ(parse_byte_size("5GB"), 5'000'000'000u);
  EXPECT_EQ(parse_byte_size("120kb"), 120'000u);
  EXPECT_EQ(parse_byte_size("2GiB"), uint64_t{2} << 30);
  EXPECT_EQ(parse_byte_size("17"), 17u);
  for (const char* text : {"", "GB", "0", "0GB", "-1GB", "5 GB", "5.5GB", "5XB", "99999999999999999999",
                           "9223372036854775807KB"}) {
    expect_error([&] { parse_byte_size(text); }, "is not a size");
  }
}

TEST(Summary, TellsBothKinds) {
  const TempFolder folder;
  Weights weights(small_model());
  export_hf(folder / "hf", weights.config, weights.parameters, weights.arena.data(), {.dtype = DType::kBF16});
  const json hf = summarise_checkpoint(folder / "hf");
  EXPECT_EQ(hf["kind"], "huggingface");
  EXPECT_EQ(hf["layout"], "block_sparse_moe");
  EXPECT_EQ(hf["parameters"], weights.parameters.num_parameters());
  EXPECT_EQ(hf["bytes"], weights.parameters.num_parameters() * 2);
  EXPECT_EQ(hf["groups"][0]["dtypes"]["BF16"], hf["groups"][0]["tensors"]);
  EXPECT_NE(summary_text(hf).find("huggingface checkpoint"), std::string::npos);

  std::vector<TensorGroup> groups = {{"model", {}}, {"exp_avg", {}}};
  for (auto& group : groups) {
    for (const auto& spec : weights.parameters.specs()) {
      group.tensors.push_back(
          {spec.name, weights.parameters.view(TensorView(weights.arena.data(), DType::kF32,
                                                         {static_cast<int64_t>(weights.arena.size())}),
                                              spec)});
    }
  }
  const CheckpointStore store(folder / "run/checkpoints");
  store.save(7, groups, {{"seed", 5}, {"config_yaml", "long"}});
  const json training = summarise_checkpoint(folder / "run");
  EXPECT_EQ(training["kind"], "training");
  EXPECT_EQ(training["step"], 7);
  EXPECT_EQ(training["parameters"], weights.parameters.num_parameters());
  EXPECT_EQ(training["bytes"], weights.parameters.num_parameters() * 8);
  EXPECT_EQ(training["state"], json({{"seed", 5}}));
  EXPECT_EQ(training["groups"].size(), 2u);
  EXPECT_NE(summary_text(training).find("step        7"), std::string::npos);
  const json good = verify_any_checkpoint(store.step_path(7));
  EXPECT_TRUE(good["ok"].get<bool>()) << good;
  EXPECT_NE(verify_text(good).find(": sound ("), std::string::npos);
  fs::resize_file(store.step_path(7) / "exp_avg.safetensors", 1000);
  const json bad = verify_any_checkpoint(store.step_path(7));
  EXPECT_FALSE(bad["ok"].get<bool>());
  EXPECT_NE(verify_text(bad).find("NOT sound"), std::string::npos);
  EXPECT_FALSE(verify_any_checkpoint(folder / "run")["ok"].get<bool>());
  EXPECT_FALSE(verify_any_checkpoint(folder / "absent")["ok"].get<bool>());
  expect_error([&] { summarise_checkpoint(folder / "absent"); }, "holds no complete training checkpoint");
}

}  // namespace
}  // namespace biomoe
