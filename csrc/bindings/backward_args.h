// From keyword arguments to a BackwardArgs, for packed calls.
#pragma once

#include "../bwd/launch.h"
#include "keywords.h"

namespace dash {

// q, k, v, out, dout, dq, dk, dv as (address, row stride, head stride), lse with head before row;
// dlse likewise, if it is there.
void take_tensors(Keywords& keywords, BackwardArgs& args);

// dtype, softmax_scale, workspace, workspace_bytes, device, stream, max_ctas.
void take_launch(Keywords& keywords, BackwardArgs& args);

// Calls backward(), without Python's lock, or says that this build has no kernels.
void enqueue(BackwardArgs const& args, char const* function);

}  // namespace dash
