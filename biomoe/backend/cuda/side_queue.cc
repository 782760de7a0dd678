// Work beside a context's own.
#include <cuda_runtime.h>

#include <vector>

#include "biomoe/backend/cuda/state.h"
#include "biomoe/ops/device.h"

namespace biomoe::cuda {
namespace {

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

struct Queue {
  Queue() {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    forked = make_event();
  }
  ~Queue() {
    cudaStreamSynchronize(stream);
    cudaEventDestroy(forked);
    for (cudaEvent_t event : points) cudaEventDestroy(event);
    cudaStreamDestroy(stream);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr;
  std::vector<cudaEvent_t> points{};
};

Queue& queue_of(void* queue) {
  return *static_cast<Queue*>(queue);
}

}  // namespace

void* create_side_queue() {
  return new Queue();
}

void destroy_side_queue(void* queue) noexcept {
  delete static_cast<Queue*>(queue);
}

void* side_stream(void* queue) {
  return queue_of(queue).stream;
}

void fork_side_queue(DeviceState* state, void* queue) {
  check(cudaEventRecord(queue_of(queue).forked, state->stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(queue_of(queue).stream, queue_of(queue).forked, 0), "cudaStreamWaitEvent");
}

void mark_side_queue(void* queue, size_t point) {
  auto& points = queue_of(queue).points;
  while (points.size() <= point) points.push_back(make_event());
  check(cudaEventRecord(points[point], queue_of(queue).stream), "cudaEventRecord");
}

void join_side_queue(DeviceState* state, void* queue, size_t point) {
  check(cudaStreamWaitEvent(state->stream, queue_of(queue).points.at(point), 0), "cudaStreamWaitEvent");
}

}  // namespace biomoe::cuda
