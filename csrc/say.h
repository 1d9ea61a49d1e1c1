// The words of an error, without streams: where an extension finds another libstdc++ than torch was built with, the first
// number written to a stream ended the process (seen on a machine with Python 3.12).
#pragma once
#include <string>
#include <type_traits>

namespace qmk {

template <class T>
std::string word(const T& t) {
  if constexpr (std::is_arithmetic_v<T>) return std::to_string(t);
  else return std::string(t);
}
template <class... T>
std::string say(const T&... parts) {
  std::string all;
  ((all += word(parts)), ...);
  return all;
}

}  // namespace qmk
