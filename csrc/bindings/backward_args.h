// From keyword arguments to a BackwardArgs, for dense and packed calls.
#pragma once

#include "../bwd/launch.h"
#include "keywords.h"

namespace dash {

// q, k, v, out, dout, lse, dq, dk, dv. Batched: (address, batch, row, head stride); else without
// the batch's. lse has head before row.
void take_tensors(Keywords& keywords, BackwardArgs& args, bool batched);

// dtype, softmax_scale, workspace, workspace_bytes, device, stream, max_ctas.
void take_launch(Keywords& keywords, BackwardArgs& args);

// Calls backward(), without Python's lock, or says that this build has no kernels.
void enqueue(BackwardArgs const& args, char const* function);

}  // namespace dash
