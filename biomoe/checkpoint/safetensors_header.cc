#include "biomoe/checkpoint/safetensors_header.h"

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr std::array kDTypes{DType::kF32, DType::kBF16, DType::kF16, DType::kF64,
                             DType::kI32, DType::kI64,  DType::kU8};

class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}
  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return refuse("a fraction"); }
  bool binary(binary_t&) override { return refuse("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        throw error("an axis of {} elements", value);
      }
      if (shape_.rank() == kMaxRank) throw error("more than {} axes", kMaxRank);
      shape_.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets) {
      if (num_offsets_ == 2) throw error("data_offsets has more than two numbers");
      offsets_[num_offsets_++] = value;
      return true;
    }
    return refuse("a number");
  }

  bool string(string_t& text) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = text;
      return true;
    }
    if (state_ != State::kTensor || key_ != "dtype") return refuse("text");
    for (DType dtype : kDTypes) {
      if (dtype_name(dtype) == text) dtype_ = dtype;
    }
    if (!dtype_) throw error("unknown dtype {}", quote(text));
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
    } else if (state_ == State::kTop) {
      state_ = tensor_ == "__metadata__" ? State::kMetadata : State::kTensor;
      keys_.clear();
      key_.clear();
      dtype_.reset();
      shape_ = Shape();
      num_offsets_ = 0;
      has_shape_ = false;
    } else {
      return refuse("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (state_ == State::kTop) {
      tensor_ = name;
      if (!names_.insert(name).second) throw error("the name is given twice");
      return true;
    }
    if (!keys_.insert(name).second) throw error("the key {} is given twice", quote(name));
    key_ = name;
    if (state_ == State::kTensor && name != "dtype" && name != "shape" && name != "data_offsets") {
      throw error("unknown key {}", quote(name));
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kTensor && key_ == "shape") {
      state_ = State::kShape;
      has_shape_ = true;
    } else if (state_ == State::kTensor && key_ == "data_offsets") {
      state_ = State::kOffsets;
    } else {
      return refuse("a list");
    }
    return true;
  }

  bool end_array() override {
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor) finish_tensor();
    state_ = State::kTop;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw user_error("{}: the safetensors header is not valid JSON at byte {}", file_, position);
  }

 private:
  enum class State { kStart, kTop, kTensor, kMetadata, kShape, kOffsets };

  template <typename... Args>
  Error error(fmt::format_string<Args...> format, Args&&... args) const {
    return user_error("{}: tensor {}: {}", file_, quote(tensor_),
                      fmt::format(format, std::forward<Args>(args)...));
  }

  bool refuse(const char* what) const {
    if (state_ == State::kStart)
      throw user_error("{}: the safetensors header is {}, not an object", file_, what);
    throw error("{} where the format has none", what);
  }

  void finish_tensor() {
    if (!dtype_ || !has_shape_ || num_offsets_ != 2) throw error("dtype, shape or data_offsets is missing");
    uint64_t bytes = dtype_size(*dtype_);
    bool empty = false;
    for (int axis = 0; axis < shape_.rank(); ++axis) {
      if (shape_[axis] == 0) {
        empty = true;  // the other axes must still multiply to something that fits
      } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(shape_[axis]), &bytes) || bytes >> 63) {
        throw error("shape {} of {} overflows 64 bits", shape_.str(), dtype_name(*dtype_));
      }
    }
    if (empty) bytes = 0;
    if (offsets_[1] < offsets_[0])
      throw error("data_offsets [{}, {}] run backwards", offsets_[0], offsets_[1]);
    if (offsets_[1] - offsets_[0] != bytes) {
      throw error("shape {} of {} needs {} bytes, data_offsets [{}, {}] hold {}", shape_.str(),
                  dtype_name(*dtype_), bytes, offsets_[0], offsets_[1], offsets_[1] - offsets_[0]);
    }
    header_.entries.push_back({tensor_, *dtype_, shape_, offsets_[0], bytes});
  }

  const std::string& file_;
  SafetensorsHeader header_;
  State state_ = State::kStart;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> keys_;  // of the object being read
  std::string tensor_;
  std::string key_;
  std::optional<DType> dtype_;
  Shape shape_;
  bool has_shape_ = false;
  std::array<uint64_t, 2> offsets_{};
  size_t num_offsets_ = 0;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file) {
  HeaderReader reader(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

}  // namespace biomoe
