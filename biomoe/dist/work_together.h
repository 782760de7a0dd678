// Long work on each rank during which the ranks tell each other that they are there.
#pragma once

#include <functional>
#include <string_view>

#include "biomoe/dist/comm.h"

namespace biomoe {

// Runs this rank's `work` in a thread of its own and returns when that of all ranks has ended. It may take as
// long as it takes, on some ranks longer than on others or on one alone (the others give what does nothing):
// meanwhile the ranks exchange a word every tenth of a second, so that one that stops or dies is named by the
// others within the timeout, as `what`, as in any other call (see Transport). All ranks make the call; `work`
// makes none to other ranks and gives nothing to a GPU. When it throws on one rank, its error goes on there,
// and the others throw one of the same kind, "rank R: ...".
void work_together(Comm& ranks, std::string_view what, const std::function<void()>& work);

}  // namespace biomoe
