#include "biomoe/ops/device_peak.h"

namespace biomoe {
namespace {

// By a part of the name; the first that fits. TFLOP/s without sparsity, from NVIDIA's data sheets.
constexpr struct {
  std::string_view part;
  double tflops;
} kPeaks[] = {
    {"H200 NVL", 835.5}, {"H200", 989.4},    {"GH200", 989.4},
    {"H100 NVL", 835.5}, {"H100 PCIe", 756}, {"H100 80GB HBM3", 989.4},
    {"H100 SXM", 989.4}, {"H800", 989.4},    {"H20-", 148},
    {"B200", 2250},      {"B300", 2250},     {"A100", 312},
    {"A800", 312},       {"A30", 165},       {"A40", 149.7},
    {"A10G", 70},        {"A10", 125},       {"L40S", 362},
    {"L40", 181},        {"L4", 121},
};

bool is_word_character(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// `part` in `name`, not as a piece of a longer word.
bool names(std::string_view name, std::string_view part) {
  for (size_t at = name.find(part); at != std::string_view::npos; at = name.find(part, at + 1)) {
    const size_t end = at + part.size();
    const bool begins = at == 0 || !is_word_character(name[at - 1]);
    const bool ends = end == name.size() || !is_word_character(part.back()) || !is_word_character(name[end]);
    if (begins && ends) return true;
  }
  return false;
}

}  // namespace

std::optional<double> peak_bf16_flops(std::string_view name) {
  if (names(name, "MIG")) return std::nullopt;
  for (const auto& peak : kPeaks) {
    if (names(name, peak.part)) return peak.tflops * 1e12;
  }
  return std::nullopt;
}

}  // namespace biomoe
