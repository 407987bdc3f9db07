// Sends and receives, which UCCL has taken out of its engine: the names are left, and nothing behind them.
#include "log.hpp"
#include "uccl_engine.h"

static int refuse(const char *call) { return shim::complain(call, "there are no two-sided transfers: use a write, or a notification"); }

int uccl_engine_send(uccl_conn_t *, uccl_mr_t, void const *, size_t, uint64_t *) { return refuse("uccl_engine_send"); }

int uccl_engine_send_vector(uccl_conn_t *, std::vector<uccl_mr_t>, std::vector<void const *>, std::vector<size_t>, int, uint64_t *) {
    return refuse("uccl_engine_send_vector");
}

int uccl_engine_recv(uccl_conn_t *, uccl_mr_t, void *, size_t) { return refuse("uccl_engine_recv"); }
