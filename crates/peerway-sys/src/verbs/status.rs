//! The status of completions.

use std::fmt;

use super::ffi::*;

/// The status of a completion. `Display` shows it in words.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct WcStatus(pub u32);

impl WcStatus {
    /// Whether the request succeeded.
    pub fn is_success(self) -> bool {
        self.0 == IBV_WC_SUCCESS
    }

    /// Whether the device never tried the request, because an earlier one failed or the queue pair
    /// was stopped.
    pub fn is_flushed(self) -> bool {
        self.0 == IBV_WC_WR_FLUSH_ERR
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            IBV_WC_SUCCESS => "success",
            IBV_WC_LOC_LEN_ERR => "local length error",
            IBV_WC_LOC_QP_OP_ERR => "local queue pair operation error",
            IBV_WC_LOC_EEC_OP_ERR => "local end-to-end context operation error",
            IBV_WC_LOC_PROT_ERR => "local protection error",
            IBV_WC_WR_FLUSH_ERR => "request flushed",
            IBV_WC_MW_BIND_ERR => "memory window bind error",
            IBV_WC_BAD_RESP_ERR => "bad response",
            IBV_WC_LOC_ACCESS_ERR => "local access error",
            IBV_WC_REM_INV_REQ_ERR => "the remote side rejected the request as invalid",
            IBV_WC_REM_ACCESS_ERR => "remote access error",
            IBV_WC_REM_OP_ERR => "remote operation error",
            IBV_WC_RETRY_EXC_ERR => "no acknowledgement after all retries",
            IBV_WC_RNR_RETRY_EXC_ERR => "receiver not ready after all retries",
            IBV_WC_LOC_RDD_VIOL_ERR => "local datagram domain violation",
            IBV_WC_REM_INV_RD_REQ_ERR => "the remote side rejected the read request as invalid",
            IBV_WC_REM_ABORT_ERR => "the remote side aborted",
            IBV_WC_INV_EECN_ERR => "invalid end-to-end context number",
            IBV_WC_INV_EEC_STATE_ERR => "invalid end-to-end context state",
            IBV_WC_FATAL_ERR => "fatal error",
            IBV_WC_RESP_TIMEOUT_ERR => "response timed out",
            IBV_WC_GENERAL_ERR => "general error",
            IBV_WC_TM_ERR => "tag matching error",
            IBV_WC_TM_RNDV_INCOMPLETE => "tag matching rendezvous incomplete",
            other => return write!(f, "unknown status {other}"),
        })
    }
}

impl ibv_wc {
    /// The status.
    pub fn status(&self) -> WcStatus {
        WcStatus(self.status)
    }

    /// Whether this is the completion of a receive.
    pub fn is_receive(&self) -> bool {
        self.opcode & IBV_WC_RECV != 0
    }

    /// The immediate of the completion, in host byte order.
    pub fn immediate(&self) -> Option<u32> {
        (self.wc_flags & IBV_WC_WITH_IMM != 0).then(|| u32::from_be(self.imm_data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_own_words() {
        let mut words: Vec<String> =
            (0..=IBV_WC_TM_RNDV_INCOMPLETE).map(|status| WcStatus(status).to_string()).collect();
        words.sort();
        words.dedup();
        assert_eq!(words.len(), 24);
        assert!(words.iter().all(|words| !words.starts_with("unknown")));
        assert_eq!(WcStatus(99).to_string(), "unknown status 99");
        assert!(WcStatus(IBV_WC_SUCCESS).is_success() && !WcStatus(IBV_WC_SUCCESS).is_flushed());
    }

    #[test]
    fn an_immediate_is_there_only_when_flagged() {
        let mut wc = ibv_wc { imm_data: 0x0102_0304u32.to_be(), ..ibv_wc::zeroed() };
        assert_eq!((wc.immediate(), wc.is_receive()), (None, false));
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        assert_eq!((wc.immediate(), wc.is_receive()), (Some(0x0102_0304), true));
    }
}
