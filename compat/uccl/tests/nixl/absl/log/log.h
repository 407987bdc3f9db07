// The part of Abseil's log that NIXL's plugin uses, so that it compiles without Abseil. Errors and
// warnings go to standard error. Other messages are dropped.
#pragma once

#include <iostream>
#include <sstream>

namespace shadow {

class Line {
  public:
    explicit Line(bool shown) : shown_(shown) {}
    ~Line() {
        if (shown_) std::cerr << text_.str() + "\n";
    }
    template <typename Value> Line &operator<<(const Value &value) {
        text_ << value;
        return *this;
    }
    Line &operator<<(std::ostream &(*change)(std::ostream &)) {
        text_ << change;
        return *this;
    }
    Line &WithPerror() { return *this; }

  private:
    bool shown_;
    std::ostringstream text_;
};

enum Level { INFO = 0, WARNING = 1, ERROR = 1, FATAL = 1 };

} // namespace shadow

#define LOG(level) shadow::Line(shadow::level != 0)
#define VLOG(level) shadow::Line(false)
#define DVLOG(level) shadow::Line(false)
