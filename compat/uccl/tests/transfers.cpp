// Two processes: connect and accept, writes, reads and vectors, notifications in both directions,
// and a killed peer.
#include "check.hpp"

#include <csignal>
#include <cstring>
#include <vector>

static const size_t BYTES = 1 << 20;

// The owner of the memory sends this to the user through a socket.
struct Invitation {
    char host[256];
    int port;
    FifoItem item;
};

static notify_msg_t fixed(const char *name, const char *message) {
    notify_msg_t note{};
    std::snprintf(note.name, sizeof note.name, "%s", name);
    std::snprintf(note.msg, sizeof note.msg, "%s", message);
    return note;
}

// Longer than one notification of libpeerway.
static std::string long_message() {
    std::string text(5 << 19, '\0');
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i / 1000);
    return text;
}

static std::vector<notify_msg_v_t> notes(size_t count) {
    std::vector<notify_msg_v_t> found;
    until("notifications", [&] {
        for (auto &note : uccl_engine_get_notifs_v()) found.push_back(note);
        return found.size() >= count;
    });
    TRUE(found.size() == count);
    return found;
}

static void owner(int socket) {
    watch();
    uccl_engine_t *engine = uccl_engine_create(4, false);
    TRUE(engine != nullptr);
    std::vector<unsigned char> memory(BYTES, 1);
    const uccl_mr_t mr = registered(engine, memory.data(), BYTES);
    const Address address(engine);
    Invitation invitation{};
    std::snprintf(invitation.host, sizeof invitation.host, "%s", address.host.c_str());
    invitation.port = address.port;
    invitation.item = prepared(engine, mr, memory.data(), BYTES);
    TRUE(write(socket, &invitation, sizeof invitation) == sizeof invitation);

    char host[256] = "";
    int gpu = -2;
    uccl_conn_t *conn = uccl_engine_accept(engine, host, sizeof host, &gpu);
    TRUE(conn && host[0] && gpu == 0 && uccl_engine_start_listener(conn) == 0);

    // Notifications arrive in order, with any length, and may contain zero bytes.
    const auto said = notes(4);
    TRUE(said[0].name == "user" && said[0].msg.size() == MSG_SIZE && std::strcmp(said[0].msg.c_str(), "written") == 0);
    TRUE(said[1].msg == std::string("a\0b", 3));
    TRUE(said[2].name == std::string(300, 'n') && said[2].msg == std::string(300'000, 'm'));
    TRUE(said[3].name == "long" && said[3].msg == long_message());
    TRUE(memory[0] == 7 && memory[BYTES - 1] == 7);

    // The accepting side can send too.
    std::fill(memory.begin(), memory.end(), 9);
    notify_msg_t note = fixed("owner", "read it");
    TRUE(uccl_engine_send_notif(conn, &note) == 0);
    notify_msg_v_t longer{"owner", std::string(257, 'x')};
    TRUE(uccl_engine_send_notif_v(conn, &longer) == 0);
    for (;;) pause();
}

static void vectors(uccl_conn_t *conn, uccl_mr_t mr, std::vector<unsigned char> &memory, const FifoItem &whole) {
    const size_t piece = 1000, step = 4096, count = 100;
    std::vector<uccl_mr_t> mrs(count, mr);
    std::vector<void *> data;
    std::vector<size_t> sizes(count, piece);
    std::vector<FifoItem> items(count, whole);
    for (size_t i = 0; i < count; ++i) {
        data.push_back(&memory[i * step]);
        TRUE(uccl_engine_update_fifo(items[i], whole.addr + (count - 1 - i) * step, piece) == 0);
    }
    for (size_t i = 0; i < BYTES; ++i) memory[i] = static_cast<unsigned char>(i / step);
    uint64_t id = 0;
    TRUE(uccl_engine_write_vector(conn, mrs, data, sizes, items, count, &id) == 0);
    finish(conn, id);
    std::fill(memory.begin(), memory.end(), 0);
    // Read the pieces back in reverse order: one registration, many pieces.
    for (size_t i = 0; i < count; ++i) data[i] = &memory[(count - 1 - i) * step];
    TRUE(uccl_engine_read_vector(conn, mrs, data, sizes, items, count, &id) == 0);
    finish(conn, id);
    for (size_t i = 0; i < count; ++i) TRUE(memory[i * step] == count - 1 - i && memory[i * step + piece - 1] == count - 1 - i && memory[i * step + piece] == 0);

    // Lists that are too short, and pieces without an item.
    uint64_t none = 77;
    sizes.pop_back();
    SAYS("shorter than the 100 pieces", TRUE(uccl_engine_read_vector(conn, mrs, data, sizes, items, count, &none) == -1));
    SAYS("num_iovs is 0", TRUE(uccl_engine_write_vector(conn, {}, {}, {}, {}, 0, &none) == -1));
    SAYS("neither an item nor IPC info", TRUE(uccl_engine_write_vector(conn, {mr}, {memory.data()}, {8}, {FifoItem{}}, 1, &none) == -1));
    SAYS("transfer_id is null", TRUE(uccl_engine_write_vector(conn, {mr}, {memory.data()}, {8}, {whole}, 1, nullptr) == -1));
    TRUE(none == 77);
}

int main() {
    watch();
    int sockets[2];
    TRUE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    const pid_t child = fork();
    if (child == 0) owner(sockets[1]);
    Invitation invitation;
    TRUE(recv(sockets[0], &invitation, sizeof invitation, MSG_WAITALL) == sizeof invitation);

    uccl_engine_t *engine = uccl_engine_create(4, false);
    TRUE(engine != nullptr);
    uccl_conn_t *conn = uccl_engine_connect(engine, invitation.host, "0", invitation.port);
    TRUE(conn && uccl_engine_conn_is_local(conn));
    std::vector<unsigned char> memory(BYTES, 7);
    const uccl_mr_t mr = registered(engine, memory.data(), BYTES);
    uint64_t id = 0;

    TRUE(uccl_engine_write(conn, mr, memory.data(), BYTES, invitation.item, &id) == 0 && id != 0);
    finish(conn, id);
    // An end is reported once. After that, the transfer counts as ended.
    SAYS("its end has been reported", TRUE(uccl_engine_xfer_status(conn, id)));
    notify_msg_t note = fixed("user", "written");
    TRUE(uccl_engine_send_notif(conn, &note) == 0);
    notify_msg_v_t any{"user", std::string("a\0b", 3)};
    TRUE(uccl_engine_send_notif_v(conn, &any) == 0);
    any = {std::string(300, 'n'), std::string(300'000, 'm')};
    TRUE(uccl_engine_send_notif_v(conn, &any) == 0);
    any = {"long", long_message()};
    TRUE(uccl_engine_send_notif_v(conn, &any) == 0);
    any.msg.resize(64 << 20);
    SAYS("longer than", TRUE(uccl_engine_send_notif_v(conn, &any) == -1));

    // A message that does not fit into 256 bytes is truncated, and an error is logged.
    std::vector<notify_msg_t> said;
    SAYS("of 257 bytes is cut to 256", until("notifications", [&] {
             for (auto &found : uccl_engine_get_notifs()) said.push_back(found);
             return said.size() >= 2;
         }));
    TRUE(std::strcmp(said[0].name, "owner") == 0 && std::strcmp(said[0].msg, "read it") == 0);
    TRUE(said[1].msg[0] == 'x' && said[1].msg[MSG_SIZE - 1] == 'x');
    TRUE(uccl_engine_read(conn, mr, memory.data(), BYTES / 2, invitation.item, &id) == 0);
    finish(conn, id);
    TRUE(memory[0] == 9 && memory[BYTES / 2 - 1] == 9 && memory[BYTES / 2] == 7);

    vectors(conn, mr, memory, invitation.item);

    // Ranges outside the item or the registration, and a length that was truncated to 32 bits.
    FifoItem item = invitation.item;
    SAYS("beyond the address space", TRUE(uccl_engine_update_fifo(item, UINT64_MAX, 8) == -1));
    TRUE(uccl_engine_update_fifo(item, item.addr + BYTES, 8) == 0);
    SAYS("piece 0", TRUE(uccl_engine_write(conn, mr, memory.data(), 8, item, &id) == -1));
    TRUE(uccl_engine_update_fifo(item, invitation.item.addr, static_cast<uint32_t>((UINT64_C(1) << 32) + 8)) == 0);
    SAYS("its item has only 8", TRUE(uccl_engine_write(conn, mr, memory.data(), 4096, item, &id) == -1));
    SAYS("uccl_engine_write: ", TRUE(uccl_engine_write(conn, mr, memory.data() + BYTES - 8, 16, invitation.item, &id) == -1));
    SAYS("uccl_engine_write: ", TRUE(uccl_engine_write(conn, mr, memory.data() - 8, 16, invitation.item, &id) == -1));
    SAYS("no registration 12345", TRUE(uccl_engine_read(conn, 12345, memory.data(), 16, invitation.item, &id) == -1));
    item.padding[0] = static_cast<char>(item.padding[0] ^ 1);
    SAYS("uccl_engine_read: ", TRUE(uccl_engine_read(conn, mr, memory.data(), 8, item, &id) == -1));

    // The peer is killed. Posted transfers end, and the next notification is not sent.
    TRUE(kill(child, SIGKILL) == 0 && waitpid(child, nullptr, 0) == child);
    bool refused = false;
    SAYS("the peer is gone", until("the end of the peer", [&] {
             if (uccl_engine_write(conn, mr, memory.data(), BYTES, invitation.item, &id) == -1) return refused = true;
             finish(conn, id);
             return uccl_engine_send_notif(conn, &note) == -1;
         }));
    SAYS("", TRUE(uccl_engine_send_notif(conn, &note) == -1));
    SAYS("uccl_engine_connect: ", TRUE(uccl_engine_connect(engine, invitation.host, "0", invitation.port) == nullptr));

    uccl_engine_conn_destroy(conn);
    uccl_engine_mr_destroy(engine, mr);
    uccl_engine_destroy(engine);
    std::puts("ok");
}
