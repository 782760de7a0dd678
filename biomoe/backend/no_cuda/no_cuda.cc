// Stands in for backend/cuda where the program is built without CUDA.
#include "biomoe/core/error.h"
#include "biomoe/ops/op_list.h"

namespace biomoe::cuda {

#define BIOMOE_THROW_NO_CUDA(name, Args)                                               \
  void name(Context&, const Args&) {                                                   \
    throw user_error("{}: this biomoe was built without CUDA; set device=cpu", #name); \
  }
BIOMOE_FOR_EACH_OP(BIOMOE_THROW_NO_CUDA)
#undef BIOMOE_THROW_NO_CUDA

}  // namespace biomoe::cuda
