// Sends and receives. UCCL has removed them from its engine and kept only the names.
#include "log.hpp"
#include "uccl_engine.h"

static int refuse(const char *call) { return shim::complain(call, "two-sided transfers are not supported: use a write or a notification"); }

int uccl_engine_send(uccl_conn_t *, uccl_mr_t, void const *, size_t, uint64_t *) { return refuse("uccl_engine_send"); }

int uccl_engine_send_vector(uccl_conn_t *, std::vector<uccl_mr_t>, std::vector<void const *>, std::vector<size_t>, int, uint64_t *) {
    return refuse("uccl_engine_send_vector");
}

int uccl_engine_recv(uccl_conn_t *, uccl_mr_t, void *, size_t) { return refuse("uccl_engine_recv"); }
