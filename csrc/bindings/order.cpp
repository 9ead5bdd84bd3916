// A schedule's order as a stream of bytes, for fingerprints.
#include "../schedule/order_reader.h"

#include "keywords.h"

namespace dash {

void bind_order(py::module_& m) {
  py::class_<OrderReader>(m, "OrderReader", "The order of one sequence's sums, read in blocks.")
      .def(py::init([](std::string const& strategy, Problem const& problem, bool as_runs) {
             return OrderReader(strategy_for(strategy, problem), problem, as_runs);
           }),
           py::arg("strategy"), py::arg("problem"), py::arg("as_runs"))
      .def_property_readonly("visits", &OrderReader::visits)
      .def(
          "read",
          [](OrderReader& reader, py::buffer buffer) {
            py::buffer_info const info = buffer.request(/*writable=*/true);
            auto const words = static_cast<size_t>(info.size * info.itemsize) / sizeof(int64_t);
            if (words < 8) throw wrong("buffer", std::to_string(words) + " words", "8 or more");
            py::gil_scoped_release release;
            return reader.read(static_cast<int64_t*>(info.ptr), words) * sizeof(int64_t);
          },
          py::arg("buffer"), "Fills the buffer with the next bytes; says how many, 0 at the end.");
}

}  // namespace dash
