// Helpers of the checkpoint tests: hand-made safetensors files, errors as text.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/core/error.h"
#include "biomoe/core/rng.h"
#include "biomoe/model/model_config.h"
#include "tests/test_folder.h"

namespace biomoe::testing {

using test::TempFolder;

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  ASSERT_TRUE(file.good()) << path;
}

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void replace_text(const std::filesystem::path& path, const std::string& from, const std::string& to) {
  std::string text = read_bytes(path);
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from << " is not in " << path;
  write_bytes(path, text.replace(at, from.size(), to));
}

// A safetensors file of this header and `data_bytes` bytes of data.
inline std::string safetensors_bytes(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header +
         std::string(data_bytes, '\1');
}

// The message of the biomoe::Error that `action` throws; "" when it throws none. Checks kind and that it is
// one line.
inline std::string error_of(const std::function<void()>& action, ErrorKind kind = ErrorKind::kUser) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), kind) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u);
    return message;
  }
  return "";
}

// `what` must be in the error that `action` throws.
inline void expect_error(const std::function<void()>& action, const std::string& what,
                         ErrorKind kind = ErrorKind::kUser) {
  const std::string message = error_of(action, kind);
  EXPECT_NE(message.find(what), std::string::npos)
      << "error: '" << message << "', expected: '" << what << "'";
}

inline ModelConfig small_model() {
  ModelConfig config;
  config.vocab_size = 16;
  config.hidden_size = 8;
  config.intermediate_size = 12;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.num_local_experts = 3;
  config.num_experts_per_tok = 2;
  return config;
}

// Distinct values in [-1, 1), the same for the same seed.
inline std::vector<float> random_floats(int64_t count, uint64_t seed) {
  const Rng rng(seed, RngStream::kTest);
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(rng.uniform(i) * 2 - 1);
  return values;
}

// Two groups of tensors over one block of floats that says which step they belong to.
class FakeRun {
 public:
  explicit FakeRun(int64_t rows = 8) : values_(static_cast<size_t>(rows * 4 + 8)) {
    float* data = values_.data();
    groups_ = {
        {"model",
         {{"a.weight", {data, DType::kF32, {rows, 4}}}, {"b.bias", {data + rows * 4, DType::kF32, {4}}}}},
        {"exp_avg", {{"b.bias", {data + rows * 4 + 4, DType::kF32, {4}}}}}};
  }
  void set_step(int64_t step) {
    for (size_t i = 0; i < values_.size(); ++i)
      values_[i] = static_cast<float>(step * 1000) + static_cast<float>(i);
  }
  bool is_step(int64_t step) const {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i] != static_cast<float>(step * 1000) + static_cast<float>(i)) return false;
    }
    return true;
  }
  void clear() { values_.assign(values_.size(), -1.0f); }
  std::vector<TensorGroup>& groups() { return groups_; }

 private:
  std::vector<float> values_;
  std::vector<TensorGroup> groups_;
};

}  // namespace biomoe::testing
