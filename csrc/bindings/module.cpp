// The module dash._C: structs of addresses and sizes in, errors out.
#include "keywords.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "dash's schedules and kernels";
  dash::bind_schedules(m);
  dash::bind_order(m);
  dash::bind_packing(m);
  dash::bind_backward(m);
}
