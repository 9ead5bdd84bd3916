// A strategy's number: its place in the list of strategies.h. Apart from that list, so that a file
// that only passes the number on does not include every schedule.
#pragma once

namespace dash {

enum class Strategy : int {};

}  // namespace dash
