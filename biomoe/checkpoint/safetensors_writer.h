// Writes safetensors files as a stream: header first, then the tensors' bytes in order, through one block of
// 1 MiB.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "biomoe/checkpoint/checksum.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe {

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t bytes() const { return static_cast<uint64_t>(shape.num_elements()) * dtype_size(dtype); }
};

// The file up to its data: the length of the header, and the header for `tensors` in that order.
std::string safetensors_head(const std::vector<TensorSpec>& tensors,
                             const std::map<std::string, std::string>& metadata);

class SafetensorsWriter {
 public:
  // Creates `path`, which must not exist, and writes the header for `tensors` in that order; wide element
  // types must come before narrow ones where their sizes would leave a tensor unaligned. failure with the
  // path and the system's reason.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                    const std::map<std::string, std::string>& metadata = {});

  // The next bytes of the data, in pieces of any size. failure as above (a full disk).
  void write(const void* data, size_t bytes);

  // Checks that every byte has come, flushes, fsyncs, closes; returns size and checksum of the whole file.
  // Without this call the file stays incomplete, and no reader accepts it.
  FileDigest finish();

 private:
  void flush();
  void write_through(const char* data, size_t bytes);

  std::filesystem::path path_;
  Descriptor file_;
  std::vector<char> block_;
  size_t used_ = 0;
  uint64_t expected_ = 0;  // bytes of the whole file
  uint64_t taken_ = 0;
  FileDigest digest_;
};

}  // namespace biomoe
