// Notifications: sending to a peer, and fetching for the whole process.
#include "engine.hpp"

#include <algorithm>

namespace shim {

// Sends a notification of libpeerway and waits until it arrives. Its deadline bounds the wait.
static bool deliver(Conn &conn, std::string_view message) {
    Transfer transfer;
    auto status = peerway_peer_notify(conn.peer.get(), message.data(), message.size(), out(transfer));
    if (status == PEERWAY_STATUS_BUSY) {
        // Free the slots of ended transfers, as for reads and writes.
        conn.transfers.look();
        status = peerway_peer_notify(conn.peer.get(), message.data(), message.size(), out(transfer));
    }
    return status == PEERWAY_STATUS_OK && peerway_transfer_wait(transfer.get(), PEERWAY_FOREVER, nullptr) == PEERWAY_STATUS_OK;
}

static int send(const char *call, uccl_conn_t *handle, const NotifyMsg &note) {
    const auto conn = conn_of(handle, call);
    if (!conn) return -1;
    if (conn->transfers.take_failure()) return complain(call, "the notification was not sent, because a previous transfer of this thread failed");
    if (std::max(note.name.size(), note.msg.size()) > LONGEST_NOTE || note.name.size() + note.msg.size() > LONGEST_NOTE - NOTIFY_MSG_HDR_SIZE)
        return complain(call, "the notification is longer than " + std::to_string(LONGEST_NOTE) + " bytes");
    const bool sent = in_parts(serialize_notify_msg(note), [&](std::string_view message) { return deliver(*conn, message); });
    return sent ? 0 : complain_of_engine(call);
}

static std::vector<NotifyMsg> every_note() {
    std::vector<NotifyMsg> notes;
    for (const auto &engine : Handles<Engine>::all().every()) {
        auto of_one = engine->reception().notes();
        notes.insert(notes.end(), std::make_move_iterator(of_one.begin()), std::make_move_iterator(of_one.end()));
    }
    return notes;
}

static void put(char (&into)[MSG_SIZE], const std::string &text, const char *what) {
    if (text.size() > MSG_SIZE)
        complain("uccl_engine_get_notifs", std::string("a ") + what + " of " + std::to_string(text.size()) +
                                               " bytes is cut to 256: uccl_engine_get_notifs_v returns all of it");
    std::memcpy(into, text.data(), std::min<size_t>(text.size(), MSG_SIZE));
}

} // namespace shim

using namespace shim;

int uccl_engine_send_notif(uccl_conn_t *conn, notify_msg_t *notify_msg) {
    static const char *const CALL = "uccl_engine_send_notif";
    if (!notify_msg) return complain(CALL, "notify_msg is null");
    const char *name = notify_msg->name;
    return send(CALL, conn, {0, std::string(name, strnlen(name, MSG_SIZE)), std::string(notify_msg->msg, MSG_SIZE)});
}

int uccl_engine_send_notif_v(uccl_conn_t *conn, notify_msg_v_t const *notify_msg) {
    static const char *const CALL = "uccl_engine_send_notif_v";
    if (!notify_msg) return complain(CALL, "notify_msg is null");
    return send(CALL, conn, {0, notify_msg->name, notify_msg->msg});
}

std::vector<notify_msg_t> uccl_engine_get_notifs() {
    std::vector<notify_msg_t> given;
    for (const auto &note : every_note()) {
        notify_msg_t fixed{};
        put(fixed.name, note.name, "name");
        put(fixed.msg, note.msg, "message");
        given.push_back(fixed);
    }
    return given;
}

std::vector<notify_msg_v_t> uccl_engine_get_notifs_v() {
    std::vector<notify_msg_v_t> given;
    for (auto &note : every_note()) given.push_back({std::move(note.name), std::move(note.msg)});
    return given;
}
