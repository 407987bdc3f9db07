// How a sink is shown the log; log_sinks.cpp has both.
#pragma once

#include "absl/log/log_sink.h"

namespace absl {

void AddLogSink(LogSink *sink);
void RemoveLogSink(LogSink *sink);

} // namespace absl
