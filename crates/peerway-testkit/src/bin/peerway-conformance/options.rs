//! The settings of an endpoint, encoded as a line for a peer process.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use peerway::{DataProtection, Endpoint, Pin};

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) pin: Pin,
    /// How TCP connections protect what they carry.
    pub(crate) data: DataProtection,
    /// The listening address, unless `interfaces` is set.
    pub(crate) bind: SocketAddr,
    /// Interfaces to use as rails.
    pub(crate) interfaces: Option<String>,
    /// RDMA devices to use.
    pub(crate) devices: Option<String>,
    pub(crate) detect: Duration,
    pub(crate) fence: Duration,
    pub(crate) deadline: Duration,
    pub(crate) connect: Duration,
    pub(crate) lanes: u16,
    pub(crate) notify_bytes: u64,
}

impl Options {
    pub(crate) fn build(&self) -> Result<Endpoint> {
        let builder = Endpoint::builder()
            .transport(self.pin)
            .setting("PEERWAY_DATA", self.data.to_string())
            .detect(self.detect)
            .fence(self.fence)
            .deadline(self.deadline)
            .connect_timeout(self.connect)
            .lanes(self.lanes)
            .notify_bytes(self.notify_bytes);
        let builder = match &self.devices {
            Some(devices) => builder.rdma_devices(devices),
            None => builder,
        };
        let builder = match &self.interfaces {
            Some(filter) => builder.interfaces(filter),
            None => builder.bind(self.bind),
        };
        builder.build().context("making an endpoint")
    }

    pub(crate) fn to_words(&self) -> String {
        let ms = |d: Duration| d.as_millis();
        format!(
            "pin={} data={} bind={} detect={} fence={} deadline={} connect={} lanes={} notify={}{}{}",
            self.pin,
            self.data,
            self.bind,
            ms(self.detect),
            ms(self.fence),
            ms(self.deadline),
            ms(self.connect),
            self.lanes,
            self.notify_bytes,
            self.interfaces.as_ref().map(|i| format!(" interfaces={i}")).unwrap_or_default(),
            self.devices.as_ref().map(|d| format!(" devices={d}")).unwrap_or_default(),
        )
    }

    pub(crate) fn from_words<'a>(words: impl Iterator<Item = &'a str>) -> Result<Self> {
        let ms = |value: &str| -> Result<Duration> { Ok(Duration::from_millis(value.parse()?)) };
        let mut options = Self {
            pin: Pin::Auto,
            data: DataProtection::Off,
            bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            interfaces: None,
            devices: None,
            detect: Duration::from_secs(2),
            fence: Duration::from_secs(1),
            deadline: Duration::from_secs(30),
            connect: Duration::from_secs(5),
            lanes: 1,
            notify_bytes: 16 << 20,
        };
        for word in words {
            let (key, value) = word.split_once('=').context("an option is key=value")?;
            match key {
                "pin" => options.pin = value.parse()?,
                "data" => options.data = value.parse()?,
                "bind" => options.bind = value.parse()?,
                "devices" => options.devices = Some(value.to_owned()),
                "interfaces" => options.interfaces = Some(value.to_owned()),
                "detect" => options.detect = ms(value)?,
                "fence" => options.fence = ms(value)?,
                "deadline" => options.deadline = ms(value)?,
                "connect" => options.connect = ms(value)?,
                "lanes" => options.lanes = value.parse()?,
                "notify" => options.notify_bytes = value.parse()?,
                _ => bail!("unknown option '{key}'"),
            }
        }
        Ok(options)
    }
}
