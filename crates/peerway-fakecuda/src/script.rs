//! The seeded script of `PEERWAY_FAKE_CUDA`: the machine's features, its faults, and when they
//! occur.
//!
//! `peerway-fakescript` describes the form of a script, and the crate's documentation lists the
//! items. Each of them has a value.

use std::time::Duration;

use peerway_fakescript::{at_most, number, time};
use peerway_sys::cuda::ffi::*;

/// A parsed script. The default is one GPU without faults, on which no operation is instant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Script {
    pub(crate) seed: u64,
    pub(crate) devices: u32,
    /// Bytes of memory of each device.
    pub(crate) memory: u64,
    /// The delay before every operation of a stream.
    pub(crate) latency: Duration,
    /// The largest random delay in addition.
    pub(crate) jitter: Duration,
    /// Bytes copied per nanosecond.
    pub(crate) gbps: Option<u64>,
    pub(crate) fabric: Mode,
    pub(crate) fd: Mode,
    pub(crate) vmm: bool,
    pub(crate) rdma_vmm: bool,
    pub(crate) dmabuf: bool,
    pub(crate) ordered: bool,
    pub(crate) ipc: bool,
    pub(crate) version: i32,
    pub(crate) fail: Vec<Failure>,
    pub(crate) no_init: Option<CUresult>,
}

/// The result of creating memory for a kind of handle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    Ok,
    /// The device supports it, but this process is not permitted.
    Refused,
    Unsupported,
}

impl Mode {
    pub(crate) fn allowed(self) -> Result<(), CUresult> {
        match self {
            Self::Ok => Ok(()),
            Self::Refused => Err(CUDA_ERROR_NOT_PERMITTED),
            Self::Unsupported => Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

/// A call that the script fails.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    /// The number of the call, counted from 1.
    pub(crate) at: u64,
    pub(crate) code: CUresult,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 1,
            devices: 1,
            memory: 4 << 30,
            latency: Duration::ZERO,
            // Long enough that a host that does not wait is always first.
            jitter: Duration::from_micros(50),
            gbps: None,
            fabric: Mode::Refused,
            fd: Mode::Ok,
            vmm: true,
            rdma_vmm: true,
            dmabuf: true,
            ordered: true,
            ipc: true,
            version: 13_000,
            fail: Vec::new(),
            no_init: None,
        }
    }
}

impl Script {
    /// Parses a script. `call` returns the full name of a known function.
    ///
    /// # Errors
    ///
    /// A text that names the item and its mistake.
    pub(crate) fn parse(
        text: &str,
        call: impl Fn(&str) -> Option<&'static str>,
    ) -> Result<Self, String> {
        peerway_fakescript::parse(text, |script: &mut Self, item| script.item(item, &call))
    }

    fn item(
        &mut self,
        item: &str,
        call: &impl Fn(&str) -> Option<&'static str>,
    ) -> Result<(), String> {
        let (name, value) = item.split_once('=').ok_or("the item must be NAME=VALUE")?;
        match name {
            "seed" => self.seed = number(value)?,
            "devices" => self.devices = at_most(64, value)?,
            "memory" => self.memory = number(value)?,
            "latency" => self.latency = time(value)?,
            "jitter" => self.jitter = time(value)?,
            "gbps" => {
                self.gbps = Some(number(value)?).filter(|rate| *rate > 0);
                self.gbps.ok_or("the rate must be greater than 0")?;
            }
            "fabric" => self.fabric = mode(value)?,
            "fd" => self.fd = mode(value)?,
            "vmm" => self.vmm = yes(value)?,
            "rdma_vmm" => self.rdma_vmm = yes(value)?,
            "dmabuf" => self.dmabuf = yes(value)?,
            "ordered" => self.ordered = yes(value)?,
            "ipc" => self.ipc = yes(value)?,
            "version" => self.version = number(value)?,
            "no_init" => self.no_init = Some(number(value)?),
            "fail" => {
                let (name, rest) =
                    value.split_once('@').ok_or("the value must be CALL@N[:CODE]")?;
                let (at, code) = match rest.split_once(':') {
                    Some((at, given)) => (number(at)?, number(given)?),
                    None => (number(rest)?, CUDA_ERROR_OUT_OF_MEMORY),
                };
                let call = call(name)
                    .ok_or_else(|| format!("`{name}` is not a function of this library"))?;
                self.fail.push(Failure { call, at, code });
            }
            _ => return Err("unknown item".to_owned()),
        }
        Ok(())
    }
}

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "ok" => Ok(Mode::Ok),
        "refused" => Ok(Mode::Refused),
        "unsupported" => Ok(Mode::Unsupported),
        _ => Err("the value must be `ok`, `refused` or `unsupported`".to_owned()),
    }
}

fn yes(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("the value must be `yes` or `no`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Script, String> {
        Script::parse(text, |name| (name == "cuMemMap").then_some("cuMemMap"))
    }

    #[test]
    fn a_script_is_read() {
        let text = "seed=7,devices=3, memory=9000,latency=3us,jitter=2ms,gbps=5,fabric=ok,\
                    fd=unsupported,vmm=no,rdma_vmm=no,dmabuf=no,ordered=no,ipc=no,version=11070,\
                    fail=cuMemMap@1:999,fail=cuMemMap@4,no_init=100";
        let read = parse(text).expect("every item is known");
        let failure = |at, code| Failure { call: "cuMemMap", at, code };
        let expected = Script {
            seed: 7,
            devices: 3,
            memory: 9000,
            latency: Duration::from_micros(3),
            jitter: Duration::from_millis(2),
            gbps: Some(5),
            fabric: Mode::Ok,
            fd: Mode::Unsupported,
            vmm: false,
            rdma_vmm: false,
            dmabuf: false,
            ordered: false,
            ipc: false,
            version: 11_070,
            fail: vec![failure(1, 999), failure(4, CUDA_ERROR_OUT_OF_MEMORY)],
            no_init: Some(100),
        };
        assert_eq!(read, expected);
        assert_eq!(parse(""), Ok(Script::default()));
        assert_eq!(parse("vmm=yes,fabric=refused"), Ok(Script::default()));
    }

    #[test]
    fn an_invalid_item_is_named() {
        for (text, words) in [
            ("latency=5", "`latency=5`: `5` is not a time in us, ms or s"),
            ("sped=1", "`sped=1`: unknown item"),
            ("vmm", "`vmm`: the item must be NAME=VALUE"),
            ("vmm=maybe", "`vmm=maybe`: the value must be `yes` or `no`"),
            ("fabric=no", "`fabric=no`: the value must be `ok`, `refused` or `unsupported`"),
            ("fail=cuMemMap", "`fail=cuMemMap`: the value must be CALL@N[:CODE]"),
            ("fail=cuMemNap@1", "`fail=cuMemNap@1`: `cuMemNap` is not a function of this library"),
            ("devices=1000", "`devices=1000`: must be at most 64"),
            ("gbps=0", "`gbps=0`: the rate must be greater than 0"),
            ("no_init=x", "`no_init=x`: `x` is not a number"),
        ] {
            assert_eq!(parse(text), Err(words.to_owned()));
        }
    }
}
