// Helpers of the tests of uccl_engine.h: conditions, checks of messages on standard error, and two
// processes.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <uccl_engine.h>

#define TRUE(condition) holds((condition), #condition, __FILE__, __LINE__)
// Runs a statement that must write these words to standard error.
#define SAYS(words, ...) says((words), [&] { __VA_ARGS__; }, __FILE__, __LINE__)

inline void holds(bool yes, const char *condition, const char *file, int line) {
    if (yes) return;
    std::fprintf(stderr, "%s:%d: false: %s\n", file, line, condition);
    std::exit(1);
}

inline void says(const std::string &words, const std::function<void()> &act, const char *file, int line) {
    const int kept = dup(2), written = memfd_create("said", 0);
    TRUE(kept >= 0 && written >= 0 && dup2(written, 2) == 2);
    act();
    TRUE(dup2(kept, 2) == 2);
    std::string said(static_cast<size_t>(lseek(written, 0, SEEK_END)), '\0');
    TRUE(pread(written, said.data(), said.size(), 0) == static_cast<ssize_t>(said.size()));
    close(kept), close(written);
    if (said.find(words) != said.npos) return;
    std::fprintf(stderr, "%s:%d: \"%s\" is missing on standard error: %s\n", file, line, words.c_str(), said.c_str());
    std::exit(1);
}

// The time limit is generous, because valgrind is slow and machines are busy.
inline void until(const char *what, const std::function<bool()> &condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!condition()) {
        if (std::chrono::steady_clock::now() < end) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            continue;
        }
        std::fprintf(stderr, "timed out waiting for %s\n", what);
        std::exit(1);
    }
}

// Ends the process if it hangs.
inline void watch() { alarm(240); }

// The parts of the metadata "ip:port?gpu".
struct Address {
    std::string host, gpu;
    int port;

    explicit Address(uccl_engine_t *engine) {
        char *text = nullptr;
        TRUE(uccl_engine_get_metadata(engine, &text) == 0 && text);
        const std::string whole = text;
        delete[] text;
        const size_t question = whole.find('?'), colon = whole.rfind(':', question);
        TRUE(question != whole.npos && colon != whole.npos);
        host = whole.substr(0, colon), port = std::atoi(whole.c_str() + colon + 1), gpu = whole.substr(question + 1);
    }
};

inline uccl_conn_t *connect_to(uccl_engine_t *from, const Address &to) {
    uccl_conn_t *conn = uccl_engine_connect(from, to.host.c_str(), to.gpu.c_str(), to.port);
    TRUE(conn != nullptr);
    return conn;
}

inline uccl_mr_t registered(uccl_engine_t *engine, const void *data, size_t size) {
    uccl_mr_t mr = 0;
    TRUE(uccl_engine_reg(engine, reinterpret_cast<uintptr_t>(data), size, mr) == 0 && mr != 0);
    return mr;
}

inline FifoItem prepared(uccl_engine_t *engine, uccl_mr_t mr, const void *data, size_t size) {
    char bytes[FIFO_SIZE];
    FifoItem item;
    TRUE(uccl_engine_prepare_fifo(engine, mr, data, size, bytes) == 0);
    deserialize_fifo_item(bytes, &item);
    return item;
}

inline void finish(uccl_conn_t *conn, uint64_t transfer) {
    until("the end of a transfer", [&] { return uccl_engine_xfer_status(conn, transfer); });
}
