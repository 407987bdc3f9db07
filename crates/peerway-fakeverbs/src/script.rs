//! The seeded script of `PEERWAY_FAKE_VERBS`: which faults occur, and when.
//!
//! `peerway-fakescript` describes the form of a script, and the crate's documentation lists the
//! items.

use std::time::Duration;

use peerway_fakescript::{at_most, chance, number, time};

/// A parsed script. The default is a fabric without faults.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Script {
    pub(crate) seed: u64,
    pub(crate) devices: u32,
    pub(crate) efa: bool,
    /// Chance that a packet is delayed by `delay`, so that others overtake it.
    pub(crate) reorder: f64,
    /// Chance that a packet is lost.
    pub(crate) drop: f64,
    /// Chance that a message is refused as "receiver not ready" although a receive is posted.
    pub(crate) rnr: f64,
    /// Chance that a completion appears `delay` after its effect.
    pub(crate) late: f64,
    pub(crate) delay: Duration,
    /// Travel time of every packet.
    pub(crate) latency: Duration,
    /// How long to wait per retry for a peer that exists but is silent.
    pub(crate) patience: Duration,
    /// The connection of a queue pair with this number in the process takes this long.
    pub(crate) modify_qp: Option<(Duration, u64)>,
    /// A queue pair fails when it begins the request with this number.
    pub(crate) flush_after: Option<u64>,
    /// Bytes that a process may register on a device.
    pub(crate) memlock: u64,
    /// Memory windows that a process may have on a device. Devices without any say so.
    pub(crate) windows: u32,
    /// Whether dma-bufs can be registered.
    pub(crate) dmabuf: bool,
    /// Peers' writes to dma-bufs are held back until a peer reads one.
    pub(crate) posted: bool,
    /// A post returns only when its queue pair is idle, as if the posting processor were the
    /// device.
    pub(crate) prompt: bool,
    /// Devices that disappear, and after how many requests.
    pub(crate) remove: Vec<(String, u64)>,
    /// The process dies after peers have accessed memory of a device this many times.
    pub(crate) die: Option<u64>,
    /// Devices whose link is down between two times after loading.
    pub(crate) linkdown: Vec<(String, Duration, Duration)>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 1,
            devices: 2,
            efa: false,
            reorder: 0.0,
            drop: 0.0,
            rnr: 0.0,
            late: 0.0,
            delay: Duration::from_millis(1),
            latency: Duration::ZERO,
            patience: Duration::from_secs(1),
            modify_qp: None,
            flush_after: None,
            memlock: u64::MAX,
            windows: 1 << 20,
            dmabuf: true,
            posted: false,
            prompt: false,
            remove: Vec::new(),
            die: None,
            linkdown: Vec::new(),
        }
    }
}

impl Script {
    /// # Errors
    ///
    /// A text that names the item and its mistake.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let script = peerway_fakescript::parse(text, Self::item)?;
        let known = |name: &str| (0..script.devices).any(|index| name == format!("fake{index}"));
        let named = script.remove.iter().map(|(name, _)| name);
        for name in named.chain(script.linkdown.iter().map(|(name, ..)| name)) {
            if !known(name) {
                return Err(format!("`{name}`: unknown device"));
            }
        }
        Ok(script)
    }

    fn item(&mut self, item: &str) -> Result<(), String> {
        let Some((name, value)) = item.split_once('=') else {
            match item {
                "efa" => self.efa = true,
                "posted" => self.posted = true,
                "prompt" => self.prompt = true,
                _ => return Err("unknown item".to_owned()),
            }
            return Ok(());
        };
        match name {
            "seed" => self.seed = number(value)?,
            "devices" => self.devices = at_most(200, value)?,
            "reorder" => self.reorder = chance(value)?,
            "drop" => self.drop = chance(value)?,
            "rnr" => self.rnr = chance(value)?,
            "late" => self.late = chance(value)?,
            "delay" => self.delay = time(value)?,
            "latency" => self.latency = time(value)?,
            "patience" => self.patience = time(value)?,
            "modify_qp" => {
                let (delay, which) = value.split_once('@').ok_or("the value must be T@N")?;
                self.modify_qp = Some((time(delay)?, number(which)?));
            }
            "memlock" => self.memlock = number(value)?,
            "windows" => self.windows = at_most(1 << 20, value)?,
            "dmabuf" if value == "no" => self.dmabuf = false,
            "dmabuf" => return Err("the value must be `no`".to_owned()),
            "die" => self.die = Some(number(value)?),
            "flush_after" => self.flush_after = Some(number(value)?),
            "remove" => {
                let (device, after) =
                    value.split_once('@').ok_or("the value must be DEVICE@REQUESTS")?;
                self.remove.push((device.to_owned(), number(after)?));
            }
            "linkdown" => {
                let words = "the value must be DEVICE@MS..MS";
                let (device, range) = value.split_once('@').ok_or(words)?;
                let (from, to) = range.split_once("..").ok_or(words)?;
                let (from, to) = (number(from)?, number(to)?);
                if from >= to {
                    return Err("the range ends before it begins".to_owned());
                }
                let times = (Duration::from_millis(from), Duration::from_millis(to));
                self.linkdown.push((device.to_owned(), times.0, times.1));
            }
            _ => return Err("unknown item".to_owned()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_read() {
        let text = "seed=7,devices=3, reorder=20%,delay=2ms,rnr=5%,drop=0.5%,late=10%,\
                    flush_after=1000,remove=fake1@500,efa,latency=3us,linkdown=fake0@10..20,patience=2s,memlock=9000,\
                    dmabuf=no,posted,prompt,die=40,modify_qp=1s@6";
        let script = Script::parse(text).expect("every item is known");
        assert_eq!((script.seed, script.devices, script.efa), (7, 3, true));
        assert_eq!((script.reorder, script.rnr, script.drop, script.late), (0.2, 0.05, 0.005, 0.1));
        assert_eq!(script.delay, Duration::from_millis(2));
        assert_eq!(script.latency, Duration::from_micros(3));
        assert_eq!(script.patience, Duration::from_secs(2));
        assert_eq!((script.flush_after, script.memlock), (Some(1000), 9000));
        assert!(!script.dmabuf && script.posted && script.prompt);
        assert_eq!(script.die, Some(40));
        assert_eq!(script.modify_qp, Some((Duration::from_secs(1), 6)));
        assert_eq!(script.remove, [("fake1".to_owned(), 500)]);
        let times = (Duration::from_millis(10), Duration::from_millis(20));
        assert_eq!(script.linkdown, [("fake0".to_owned(), times.0, times.1)]);
        assert_eq!(Script::parse(""), Ok(Script::default()));
    }

    #[test]
    fn an_invalid_item_is_named() {
        for (text, words) in [
            ("drop=1", "`drop=1`: `1` is not a percentage"),
            ("drop=101%", "`drop=101%`: `101%` is not a percentage"),
            ("delay=5", "`delay=5`: `5` is not a time in us, ms or s"),
            ("sped=1", "`sped=1`: unknown item"),
            ("effa", "`effa`: unknown item"),
            ("dmabuf=yes", "`dmabuf=yes`: the value must be `no`"),
            ("modify_qp=1s", "`modify_qp=1s`: the value must be T@N"),
            ("remove=fake0", "`remove=fake0`: the value must be DEVICE@REQUESTS"),
            ("remove=fake9@1", "`fake9`: unknown device"),
            ("linkdown=fake0@20..10", "`linkdown=fake0@20..10`: the range ends before it begins"),
            ("devices=1000", "`devices=1000`: must be at most 200"),
        ] {
            assert_eq!(Script::parse(text), Err(words.to_owned()));
        }
    }
}
