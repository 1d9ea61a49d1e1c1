// The message of an error, put together without iostreams: where an extension finds another libstdc++ than torch was
// built with, the first number written to one ended the process (seen on a machine with Python 3.12).
#pragma once
#include <string>
#include <type_traits>

namespace qmk {

template <class T>
std::string as_text(const T& part) {
  if constexpr (std::is_arithmetic_v<T>) return std::to_string(part);
  else return std::string(part);
}
template <class... T>
std::string message(const T&... parts) {
  std::string all;
  ((all += as_text(parts)), ...);
  return all;
}

}  // namespace qmk
