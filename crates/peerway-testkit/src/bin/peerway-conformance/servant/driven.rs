//! Orders about proxies: `proxy NAME ENDPOINT REGION` and `pcounter NAME COUNTER VALUE MS`.

use anyhow::{Context, Result};
use peerway::driven::Proxy;
use peerway_testkit::hex;

use super::{Servant, Words, typed};

impl Servant {
    pub(super) fn proxies(&mut self, verb: &str, mut words: Words<'_>) -> Result<String> {
        let name = words.text()?.to_owned();
        if verb == "proxy" {
            let endpoint = self.endpoint(&mut words)?.clone();
            let proxy = typed(Proxy::builder(&endpoint).threads(2).rings(2).counters(64).build())?;
            let region = self.regions.get(words.text()?).context("no such region")?;
            typed(proxy.window(region))?;
            let info = hex::encode(&typed(proxy.peer_info())?);
            self.proxies.insert(name, proxy);
            return Ok(info);
        }
        let proxy = self.proxies.get(&name).context("no such proxy")?;
        let (counter, value, timeout) = (words.number()?, words.number()?, words.millis()?);
        Ok(proxy.wait_counter(counter, value, timeout).to_string())
    }
}
