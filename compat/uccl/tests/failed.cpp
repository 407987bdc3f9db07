// A transfer fails while its peer lives. It ends, the failure is logged, and the next notification
// of the same thread is refused once. The test uses TCP, with IPv6 if the machine has it (addresses
// in brackets).
#include "check.hpp"

#include <arpa/inet.h>
#include <csignal>
#include <vector>

// More bytes than sockets buffer while the peer does not read.
static const size_t BYTES = 64 << 20;

struct Invitation {
    char host[256];
    int port;
    FifoItem item;
};

static void owner(int socket) {
    watch();
    uccl_engine_t *engine = uccl_engine_create(4, false);
    std::vector<unsigned char> memory(BYTES);
    const uccl_mr_t mr = registered(engine, memory.data(), BYTES);
    const Address address(engine);
    Invitation invitation{};
    std::snprintf(invitation.host, sizeof invitation.host, "%s", address.host.c_str());
    invitation.port = address.port;
    invitation.item = prepared(engine, mr, memory.data(), BYTES);
    TRUE(write(socket, &invitation, sizeof invitation) == sizeof invitation);
    // Exactly two notifications arrive.
    size_t came = 0;
    until("notifications", [&] {
        for (auto &note : uccl_engine_get_notifs_v()) TRUE(note.msg == "of another thread" || note.msg == "later"), ++came;
        return came == 2;
    });
    TRUE(write(socket, &came, 1) == 1);
    for (;;) pause();
}

static bool has_ipv6() {
    const int socket = ::socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 loopback{};
    loopback.sin6_family = AF_INET6;
    loopback.sin6_addr = in6addr_loopback;
    const bool bound = socket >= 0 && bind(socket, reinterpret_cast<sockaddr *>(&loopback), sizeof loopback) == 0;
    if (socket >= 0) close(socket);
    return bound;
}

int main() {
    watch();
    const std::string host = has_ipv6() ? "::1" : "127.0.0.1", shown = has_ipv6() ? "[::1]" : host;
    setenv("PEERWAY_BIND", host.c_str(), 1);
    setenv("UCCL_P2P_TRANSPORT", "tcp", 1);
    setenv("PEERWAY_DETECT", "60s", 1);
    int sockets[2];
    TRUE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    const pid_t child = fork();
    if (child == 0) owner(sockets[1]);
    Invitation invitation;
    TRUE(recv(sockets[0], &invitation, sizeof invitation, MSG_WAITALL) == sizeof invitation);
    setenv("PEERWAY_DEADLINE", "3s", 1);
    uccl_engine_t *engine = uccl_engine_create(4, false);
    TRUE(invitation.host == shown);
    // The address with and without brackets.
    uccl_conn_t *conn = uccl_engine_connect(engine, shown.c_str(), "", invitation.port);
    uccl_conn_t *again = uccl_engine_connect(engine, host.c_str(), "", invitation.port);
    TRUE(conn && again && !uccl_engine_conn_is_local(conn));
    uccl_engine_conn_destroy(again);

    std::vector<unsigned char> memory(BYTES);
    const uccl_mr_t mr = registered(engine, memory.data(), BYTES);
    notify_msg_v_t note{"user", "done"};
    uint64_t id = 0;
    // The first transfer imports the item, before the peer is stopped.
    TRUE(uccl_engine_read(conn, mr, memory.data(), 1, invitation.item, &id) == 0);
    finish(conn, id);
    TRUE(kill(child, SIGSTOP) == 0);
    TRUE(uccl_engine_write(conn, mr, memory.data(), BYTES, invitation.item, &id) == 0 && !uccl_engine_xfer_status(conn, id));
    SAYS("the deadline passed", finish(conn, id));
    TRUE(kill(child, SIGCONT) == 0);

    // A notification of another thread is not refused.
    std::thread other([&] {
        notify_msg_v_t theirs{"user", "of another thread"};
        TRUE(uccl_engine_send_notif_v(conn, &theirs) == 0);
    });
    other.join();
    SAYS("a previous transfer of this thread failed", TRUE(uccl_engine_send_notif_v(conn, &note) == -1));
    note.msg = "later";
    TRUE(uccl_engine_send_notif_v(conn, &note) == 0);
    char done;
    TRUE(recv(sockets[0], &done, 1, 0) == 1);
    TRUE(kill(child, SIGKILL) == 0 && waitpid(child, nullptr, 0) == child);
    uccl_engine_conn_destroy(conn);
    uccl_engine_destroy(engine);
    std::puts("ok");
}
