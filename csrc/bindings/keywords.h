// What the bindings share: keyword arguments by name, and errors that name the argument. The files
// of this folder are the only ones that know Python; none includes a Torch header, so one build
// serves every torch release.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "../schedule/limits.h"
#include "../schedule/strategies.h"

namespace dash {

namespace py = pybind11;

// Keys to one side of the diagonal; -1: unlimited.
inline int window(char const* name, int keys) {
  if (keys < kUnlimited) throw wrong(name, std::to_string(keys), "-1 (unlimited) or more");
  return smaller(keys, kMaxSeqlen);
}

class Keywords {
 public:
  Keywords(char const* function, py::kwargs kwargs)
      : function_(function), left_(std::move(kwargs)) {}

  template <typename T>
  T take(char const* name) {
    if (!left_.contains(name)) {
      throw py::type_error(std::string(function_) + "() needs the keyword argument '" + name + "'");
    }
    py::object const value = left_.attr("pop")(name);
    try {
      return value.cast<T>();
    } catch (py::cast_error const&) {
      throw wrong(std::string(function_) + "() argument '" + name + "'",
                  std::string(py::repr(value)), "a " + py::type_id<T>());
    }
  }

  template <typename T>
  T take(char const* name, T otherwise) {
    return has(name) ? take<T>(name) : otherwise;
  }

  bool has(char const* name) const { return left_.contains(name); }

  void expect_empty() const {
    for (auto const& item : left_) {
      throw py::type_error(std::string(function_) + "() got an unexpected keyword argument " +
                           std::string(py::repr(item.first)));
    }
  }

 private:
  char const* function_;
  py::dict left_;
};

char const* name_of(Strategy strategy);
Strategy strategy_named(std::string const& name);
// The same, if the strategy may run the problem on some device.
Strategy strategy_for(std::string const& name, Problem const& problem);

void bind_schedules(py::module_& m);  // schedule.cpp
void bind_order(py::module_& m);      // order.cpp
void bind_packing(py::module_& m);    // packing.cpp
void bind_backward(py::module_& m);   // backward.cpp

}  // namespace dash
