// Registers sinks. log_sinks.cpp implements both functions.
#pragma once

#include "absl/log/log_sink.h"

namespace absl {

void AddLogSink(LogSink *sink);
void RemoveLogSink(LogSink *sink);

} // namespace absl
