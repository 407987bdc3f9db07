// One process: a stopped accept, two engines, an engine connected to itself, and invalid handles.
#include "check.hpp"

#include <atomic>
#include <cstring>
#include <vector>

static void accept_is_stopped() {
    uccl_engine_t *engine = uccl_engine_create(4, true);
    std::atomic<int> ended{0};
    std::vector<std::thread> waiting;
    for (int i = 0; i < 2; ++i) waiting.emplace_back([&] { ended += uccl_engine_accept(engine, nullptr, 0, nullptr) == nullptr; });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    TRUE(ended == 0);
    uccl_engine_stop_accept(engine);
    for (auto &thread : waiting) thread.join();
    TRUE(ended == 2 && uccl_engine_accept(engine, nullptr, 0, nullptr) == nullptr);
    uccl_engine_destroy(engine);

    // Destroying an engine ends a waiting accept.
    engine = uccl_engine_create(4, true);
    std::thread thread([&] { TRUE(uccl_engine_accept(engine, nullptr, 0, nullptr) == nullptr); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    SAYS("", uccl_engine_destroy(engine); thread.join());
}

// Every connect gives one accept, also the second connect between the same two engines. Destroying
// one connection does not affect the other.
static void connections_are_told_apart() {
    uccl_engine_t *one = uccl_engine_create(4, false), *two = uccl_engine_create(4, false);
    const Address at_one(one), at_two(two);
    uccl_conn_t *there = connect_to(one, at_two);
    char host[64];
    int gpu = -2;
    uccl_conn_t *seen = uccl_engine_accept(two, host, sizeof host, &gpu);
    TRUE(seen && gpu == 0 && at_two.host == host);
    uccl_conn_t *back = connect_to(two, at_one);
    uccl_conn_t *also_seen;
    // The accept succeeds even if the address does not fit into the buffer.
    SAYS("no room for", TRUE((also_seen = uccl_engine_accept(one, host, 2, nullptr)) != nullptr && host[0] == 0));
    TRUE(uccl_engine_conn_is_local(there) && uccl_engine_conn_is_local(also_seen));

    unsigned char ours[64], theirs[64];
    std::memset(ours, 5, sizeof ours), std::memset(theirs, 0, sizeof theirs);
    const uccl_mr_t mine = registered(one, ours, sizeof ours), yours = registered(two, theirs, sizeof theirs);
    TRUE(mine != yours);
    const FifoItem item = prepared(two, yours, theirs, sizeof theirs);
    uint64_t id = 0;
    // A registration of another engine is refused.
    SAYS("no registration", TRUE(uccl_engine_write(there, yours, theirs, 8, item, &id) == -1));
    TRUE(uccl_engine_write(also_seen, mine, ours, sizeof ours, item, &id) == 0);
    finish(also_seen, id);
    TRUE(std::memcmp(ours, theirs, sizeof ours) == 0);

    // Destroying one connection leaves the others of the same session.
    uccl_engine_conn_destroy(there);
    SAYS("no such connection", TRUE(uccl_engine_write(there, mine, ours, 8, item, &id) == -1));
    TRUE(uccl_engine_write(also_seen, mine, ours, 8, item, &id) == 0);
    finish(also_seen, id);
    notify_msg_v_t note{"two", "to one"};
    TRUE(uccl_engine_send_notif_v(back, &note) == 0);
    note = {"one", "to two"};
    TRUE(uccl_engine_send_notif_v(also_seen, &note) == 0);
    // The call returns the notifications of all engines of this process.
    TRUE(uccl_engine_get_notifs_v().size() == 2 && uccl_engine_get_notifs().empty());

    // A write to revoked memory fails, and the next notification is not sent.
    uccl_engine_mr_destroy(two, yours);
    SAYS("uccl_engine_", {
        if (uccl_engine_write(also_seen, mine, ours, 8, item, &id) == 0) {
            finish(also_seen, id);
            TRUE(uccl_engine_send_notif_v(also_seen, &note) == -1);
        }
    });
    TRUE(uccl_engine_send_notif_v(also_seen, &note) == 0 && uccl_engine_get_notifs_v().size() == 1);
    uccl_engine_destroy(two);
    SAYS("uccl_engine_send_notif_v: ", TRUE(uccl_engine_send_notif_v(also_seen, &note) == -1));
    for (uccl_conn_t *conn : {seen, back, also_seen}) uccl_engine_conn_destroy(conn);
    uccl_engine_destroy(one);
}

// NIXL's plugin does this for memory of its own agent, with IPC info that is all zeros.
static void engine_with_itself() {
    uccl_engine_t *engine = uccl_engine_create(4, true);
    const Address address(engine);
    uccl_conn_t *conn = uccl_engine_connect(engine, address.host.c_str(), address.gpu.c_str(), address.port, true);
    unsigned char memory[128];
    std::memset(memory, 1, 64), std::memset(memory + 64, 2, 64);
    const uccl_mr_t mr = registered(engine, memory, sizeof memory);
    char info[IPC_INFO_SIZE] = "";
    bool has_ipc = true;
    TRUE(uccl_engine_get_ipc_info(engine, reinterpret_cast<uintptr_t>(memory), info, &has_ipc) == 0 && !has_ipc);
    FifoItem item = prepared(engine, mr, memory, sizeof memory);
    TRUE(uccl_engine_update_fifo(item, item.addr + 64, 64) == 0);
    uint64_t id = 0;
    TRUE(uccl_engine_read_vector(conn, {mr}, {memory}, {64}, {item}, 1, &id, {info}) == 0);
    finish(conn, id);
    TRUE(memory[0] == 2 && memory[63] == 2);
    uccl_engine_conn_destroy(conn);
    uccl_engine_destroy(engine);
}

static void what_is_no_handle() {
    uccl_engine_t *engine = uccl_engine_create(4, true);
    const Address address(engine);
    uccl_conn_t *conn = connect_to(engine, address);
    auto *no_engine = reinterpret_cast<uccl_engine_t *>(conn);
    auto *no_conn = reinterpret_cast<uccl_conn_t *>(engine);
    char memory[64], item[FIFO_SIZE], info[IPC_INFO_SIZE], *text = nullptr;
    bool has = true;
    uccl_mr_t mr = 5;
    uint64_t id = 0;
    notify_msg_t note{};
    notify_msg_v_t any;
    for (uccl_engine_t *bad : {static_cast<uccl_engine_t *>(nullptr), no_engine}) {
        SAYS("no such engine", TRUE(uccl_engine_get_metadata(bad, &text) == -1 && !text));
        SAYS("no such engine", TRUE(!uccl_engine_connect(bad, "127.0.0.1", "0", 1)));
        SAYS("no such engine", TRUE(!uccl_engine_accept(bad, nullptr, 0, nullptr)));
        SAYS("no such engine", TRUE(uccl_engine_reg(bad, reinterpret_cast<uintptr_t>(memory), 64, mr) == -1 && mr == 0));
        SAYS("no such engine", TRUE(uccl_engine_prepare_fifo(bad, 1, memory, 64, item) == -1));
        SAYS("no such engine", TRUE(uccl_engine_get_ipc_info(bad, 1, info, &has) == -1 && !has));
        SAYS("no such engine", uccl_engine_stop_accept(bad));
        SAYS("no such engine", uccl_engine_mr_destroy(bad, 1));
        uccl_engine_destroy(bad);
    }
    for (uccl_conn_t *bad : {static_cast<uccl_conn_t *>(nullptr), no_conn}) {
        SAYS("no such connection", TRUE(uccl_engine_read(bad, 1, memory, 1, FifoItem{}, &id) == -1));
        SAYS("no such connection", TRUE(uccl_engine_write_vector(bad, {}, {}, {}, {}, 1, &id) == -1));
        // An invalid connection has no transfers in flight, so the transfer counts as ended.
        SAYS("no such connection", TRUE(uccl_engine_xfer_status(bad, 1)));
        SAYS("no such connection", TRUE(uccl_engine_send_notif(bad, &note) == -1));
        SAYS("no such connection", TRUE(uccl_engine_send_notif_v(bad, &any) == -1));
        SAYS("no such connection", TRUE(uccl_engine_start_listener(bad) == -1 && uccl_engine_stop_listener(bad) == -1));
        SAYS("no such connection", TRUE(!uccl_engine_conn_is_local(bad)));
        uccl_engine_conn_destroy(bad);
    }
    SAYS("two-sided transfers are not supported", TRUE(uccl_engine_send(conn, 1, memory, 1, &id) == -1));
    SAYS("two-sided transfers are not supported", TRUE(uccl_engine_send_vector(conn, {}, {}, {}, 1, &id) == -1));
    SAYS("two-sided transfers are not supported", TRUE(uccl_engine_recv(conn, 1, memory, 1) == -1));
    SAYS("metadata is null", TRUE(uccl_engine_get_metadata(engine, nullptr) == -1));
    SAYS("is null", TRUE(uccl_engine_get_ipc_info(engine, 1, nullptr, nullptr) == -1));
    SAYS("no registration starts", TRUE(uccl_engine_get_ipc_info(engine, 1, info, &has) == -1));
    SAYS("ipc_buf is null", TRUE(uccl_engine_update_ipc_info(nullptr, 1, 1, 1) == -1));
    SAYS("below base_addr", TRUE(uccl_engine_update_ipc_info(info, 1, 2, 1) == -1));
    SAYS("notify_msg is null", TRUE(uccl_engine_send_notif(conn, nullptr) == -1 && uccl_engine_send_notif_v(conn, nullptr) == -1));
    SAYS("not an address and a port", TRUE(!uccl_engine_connect(engine, nullptr, nullptr, 1)));
    SAYS("not an address and a port", TRUE(!uccl_engine_connect(engine, "127.0.0.1", nullptr, 65536)));
    SAYS("uccl_engine_connect: ", TRUE(!uccl_engine_connect(engine, "not an address", nullptr, 1)));
    SAYS("uccl_engine_connect: ", TRUE(!uccl_engine_connect(engine, "::1", nullptr, 1)));
    SAYS("neither to this process nor to a GPU", TRUE(uccl_engine_reg(engine, 4096, 4096, mr) == -1));
    SAYS("uccl_engine_reg: ", TRUE(uccl_engine_reg(engine, UINTPTR_MAX - 10, 4096, mr) == -1));
    mr = registered(engine, memory, sizeof memory);
    SAYS("not inside registration", TRUE(uccl_engine_prepare_fifo(engine, mr, memory, 65, item) == -1));
    SAYS("not inside registration", TRUE(uccl_engine_prepare_fifo(engine, mr, memory - 1, 1, item) == -1));
    SAYS("fifo_buf is null", TRUE(uccl_engine_prepare_fifo(engine, mr, memory, 64, nullptr) == -1));
    SAYS("no registration 0", TRUE(uccl_engine_prepare_fifo(engine, 0, memory, 64, item) == -1));
    SAYS("no registration 0", uccl_engine_mr_destroy(engine, 0));
    uccl_engine_mr_destroy(engine, mr);
    SAYS("no registration", uccl_engine_mr_destroy(engine, mr));
    uccl_engine_conn_destroy(conn);
    uccl_engine_destroy(engine);
    SAYS("no such engine", TRUE(!uccl_engine_connect(engine, "127.0.0.1", "0", 1)));
}

static void notes_as_bytes() {
    const NotifyMsg note{3, "name", std::string("me\0ssage", 8)};
    const std::string bytes = serialize_notify_msg(note);
    NotifyMsg back;
    TRUE(bytes.size() == NOTIFY_MSG_HDR_SIZE + 12 && deserialize_notify_msg(bytes, back));
    TRUE(back.msg_type == 3 && back.name == note.name && back.msg == note.msg);
    for (size_t cut = 0; cut < bytes.size(); ++cut) TRUE(!deserialize_notify_msg(bytes.substr(0, cut), back));
    TRUE(!deserialize_notify_msg(bytes + "x", back));
    std::string other = bytes;
    other[0] ^= 1;
    TRUE(!deserialize_notify_msg(other, back));
    // Lengths whose sum would be right modulo 2^32.
    other = bytes;
    std::memset(&other[8], 0xff, 8);
    TRUE(!deserialize_notify_msg(other, back));
}

int main() {
    watch();
    accept_is_stopped();
    connections_are_told_apart();
    engine_with_itself();
    what_is_no_handle();
    notes_as_bytes();
    std::puts("ok");
}
