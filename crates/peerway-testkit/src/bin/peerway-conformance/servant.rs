//! The orders that a peer obeys. Each line of input has one line of output: `ok ...` or `err ...`.

use std::collections::HashMap;
use std::fmt::Debug;
use std::io::BufRead;
use std::process::ExitCode;
use std::str::{FromStr, SplitWhitespace};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use peerway::driven::Proxy;
use peerway::{Access, Batch, Ended, Endpoint, Peer, Region, RemoteRegion, Transfer};
use peerway_testkit::{hex, limits, memory, procfs};

use crate::hooks;
use crate::options::Options;

mod driven;
mod hostile;
pub(crate) mod namespaces;

/// Obeys the orders on standard input.
pub(crate) fn serve_lines() -> ExitCode {
    let mut servant = Servant::default();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        println!("{}", servant.answer(&line));
    }
    ExitCode::SUCCESS
}

/// All objects that orders have created, by name.
#[derive(Default)]
pub(crate) struct Servant {
    endpoints: HashMap<String, Endpoint>,
    regions: HashMap<String, Region>,
    peers: HashMap<String, Peer>,
    remotes: HashMap<String, RemoteRegion>,
    transfers: HashMap<String, Transfer>,
    proxies: HashMap<String, Proxy>,
}

impl Servant {
    pub(crate) fn answer(&mut self, line: &str) -> String {
        match self.obey(line) {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("err {}", format!("{error:#}").replace('\n', " | ")),
        }
    }

    fn obey(&mut self, line: &str) -> Result<String> {
        let mut words = Words(line.split_whitespace());
        let verb = words.text()?;
        match verb {
            "endpoint" | "close" | "connect" | "accept" | "remove" | "path" => {
                self.connections(verb, words)
            }
            "region" | "drop" | "fill" | "check" | "hash" | "countnew" | "advertise"
            | "advertise_to" | "revoke" | "stays" => self.memory(verb, words),
            "import" | "xfer" | "post" | "wait" | "cancel" | "stats" | "pstats" | "notify" => {
                self.transfers(verb, words)
            }
            "notification" => {
                let (endpoint, ms) = (self.endpoint(&mut words)?, words.millis()?);
                let note = endpoint.notification(ms);
                Ok(note.map_or_else(|| "none".into(), |n| hex::encode(&n.message)))
            }
            "drain" => {
                let endpoint = self.endpoint(&mut words)?;
                let some = || endpoint.notification(Duration::ZERO);
                Ok(std::iter::from_fn(some).count().to_string())
            }
            "refusals" => {
                let refused = self.endpoint(&mut words)?.stats().refusals;
                let all = [
                    refused.handshakes,
                    refused.sessions,
                    refused.lanes,
                    refused.descriptors,
                    refused.message_bytes,
                    refused.slow_messages,
                    refused.notifications,
                    refused.counters,
                    refused.counts_without_right,
                ];
                Ok(all.map(|count| count.to_string()).join(" "))
            }
            "counter" => Ok(self.endpoint(&mut words)?.counter(words.number()?).to_string()),
            "wait_counter" => {
                let endpoint = self.endpoint(&mut words)?;
                let (id, n, ms) = (words.number()?, words.number()?, words.millis()?);
                Ok(endpoint.wait_counter(id, n, ms).to_string())
            }
            "hook" => {
                match words.text()? {
                    "off" => hooks::off(),
                    "slow" => hooks::slow(words.number()?),
                    "land" => hooks::land_at_most(words.number()?),
                    "stop" => hooks::stop_in(words.number()?),
                    other => bail!("unknown hook '{other}'"),
                }
                Ok(String::new())
            }
            "proxy" | "pcounter" => self.proxies(verb, words),
            "copies" => Ok(hooks::copies().to_string()),
            "holdings" => {
                let held = procfs::holdings(std::process::id())?;
                let procfs::Holdings { fds, threads, maps, resident_kib } = held;
                Ok(format!("{fds} {threads} {maps} {resident_kib}"))
            }
            "descriptors" => {
                match words.text()? {
                    "all" => limits::raise_descriptors().map(drop)?,
                    most => limits::lower_descriptors(most.parse()?)?,
                }
                Ok(String::new())
            }
            "scribble" => {
                hostile::scribble(words.number()?, words.millis()?, words.text()? == "gates")
            }
            "sleep" => {
                std::thread::sleep(words.millis()?);
                Ok(String::new())
            }
            _ => bail!("unknown order '{verb}'"),
        }
    }

    fn connections(&mut self, verb: &str, mut words: Words<'_>) -> Result<String> {
        match verb {
            "endpoint" => {
                let name = words.text()?.to_owned();
                let endpoint = Options::from_words(words.0)?.build()?;
                let metadata = hex::encode(&endpoint.metadata());
                self.endpoints.insert(name, endpoint);
                Ok(metadata)
            }
            "close" => {
                self.endpoints.remove(words.text()?).context("no such endpoint")?;
                Ok(String::new())
            }
            "connect" => {
                let endpoint = self.endpoint(&mut words)?.clone();
                let name = words.text()?.to_owned();
                let peer = typed(endpoint.connect(&hex::decode(words.text()?)?))?;
                let path = peer.path().to_string();
                self.peers.insert(name, peer);
                Ok(path)
            }
            "accept" => {
                let endpoint = self.endpoint(&mut words)?.clone();
                let name = words.text()?.to_owned();
                let peer = typed(endpoint.accept(words.millis()?))?;
                let path = peer.path().to_string();
                self.peers.insert(name, peer);
                Ok(path)
            }
            "remove" => {
                self.peers.remove(words.text()?).context("no such peer")?.remove();
                Ok(String::new())
            }
            _ => Ok(self.peer(&mut words)?.path().to_string()),
        }
    }

    fn memory(&mut self, verb: &str, mut words: Words<'_>) -> Result<String> {
        if verb == "region" {
            let endpoint = self.endpoint(&mut words)?.clone();
            let name = words.text()?.to_owned();
            let len: usize = words.number()?;
            let region = match words.text()? {
                "alloc" => typed(endpoint.allocate(len))?,
                _ => typed(endpoint.register(vec![0u8; len]))?,
            };
            let addr = region.addr();
            self.regions.insert(name, region);
            return Ok(addr.to_string());
        }
        let name = words.text()?;
        if verb == "drop" {
            self.regions.remove(name).context("no such region")?;
            return Ok(String::new());
        }
        let region = self.regions.get(name).context("no such region")?;
        match verb {
            "fill" => memory::fill_all(region, words.number()?).map(|()| String::new()),
            "check" => {
                let (seed, from, offset, len) =
                    (words.number()?, words.number()?, words.number()?, words.number()?);
                memory::check(region, seed, from, offset, len).map(|()| String::new())
            }
            "hash" => Ok(memory::hash(region, 0, region.len())?.to_string()),
            "countnew" => {
                Ok(memory::count_new(region, words.number()?, words.number()?)?.to_string())
            }
            "stays" => memory::stays(region, words.millis()?).map(|()| String::new()),
            "revoke" => {
                let start = Instant::now();
                let fence = region.revoke();
                Ok(format!("{fence:?} {}", start.elapsed().as_millis()))
            }
            "advertise" => {
                let access = Access::from_bits(words.number()?).context("no such access")?;
                Ok(hex::encode(&typed(region.advertise(access))?))
            }
            _ => {
                let access = Access::from_bits(words.number()?).context("no such access")?;
                let peer = self.peers.get(words.text()?).context("no such peer")?;
                Ok(hex::encode(&typed(region.advertise_to(peer, access))?))
            }
        }
    }

    fn transfers(&mut self, verb: &str, mut words: Words<'_>) -> Result<String> {
        match verb {
            "import" => {
                let peer = self.peer(&mut words)?;
                let name = words.text()?.to_owned();
                let remote = typed(peer.import(&hex::decode(words.text()?)?))?;
                let len = remote.len();
                self.remotes.insert(name, remote);
                Ok(len.to_string())
            }
            "xfer" => {
                let (peer, batch) = self.batch(words)?;
                Ok(told(typed(peer.run(&batch))?))
            }
            "post" => {
                let name = words.text()?.to_owned();
                let (peer, batch) = self.batch(words)?;
                self.transfers.insert(name, typed(peer.post(&batch))?);
                Ok(String::new())
            }
            "notify" => {
                let peer = self.peer(&mut words)?;
                let message = hex::decode(words.text()?)?;
                Ok(told(typed(peer.notify(&message))?.join()))
            }
            "pstats" => {
                let stats = self.peer(&mut words)?.stats();
                Ok(format!(
                    "{} {} {} {} {}",
                    stats.bytes_landed,
                    stats.bytes_served,
                    stats.bytes_written,
                    stats.bytes_read,
                    stats.lanes_lost
                ))
            }
            _ => {
                let transfer = self.transfers.get(words.text()?).context("no such transfer")?;
                match verb {
                    "wait" => {
                        Ok(transfer.wait(words.millis()?).map_or_else(|| "none".into(), told))
                    }
                    "cancel" => {
                        transfer.cancel();
                        Ok(String::new())
                    }
                    _ => {
                        let stats = transfer.stats();
                        Ok(format!("{} {}", stats.bytes_done, stats.bytes_total))
                    }
                }
            }
        }
    }

    /// `PEER write|read REGION OFFSET REMOTE OFFSET LEN [deadline=MS] [notify=HEX] [count=ID]`
    fn batch(&self, mut words: Words<'_>) -> Result<(Peer, Batch)> {
        let peer = self.peer(&mut words)?.clone();
        let direction = words.text()?;
        let region = self.regions.get(words.text()?).context("no such region")?;
        let here: u64 = words.number()?;
        let remote = self.remotes.get(words.text()?).context("no such remote region")?;
        let (there, len): (u64, u64) = (words.number()?, words.number()?);
        let local = region.slice(here..here + len);
        let remote = remote.slice(there..there + len);
        let mut batch = typed(match direction {
            "write" => Batch::write(&local, &remote),
            _ => Batch::read(&local, &remote),
        })?;
        for word in words.0 {
            batch = match word.split_once('=').context("an option is key=value")? {
                ("deadline", ms) => batch.deadline(Duration::from_millis(ms.parse()?)),
                ("notify", text) => typed(batch.notify(&hex::decode(text)?))?,
                ("count", id) => batch.count(id.parse()?),
                (key, _) => bail!("unknown option '{key}'"),
            };
        }
        Ok((peer, batch))
    }

    fn endpoint(&self, words: &mut Words<'_>) -> Result<&Endpoint> {
        self.endpoints.get(words.text()?).context("no such endpoint")
    }

    fn peer(&self, words: &mut Words<'_>) -> Result<&Peer> {
        self.peers.get(words.text()?).context("no such peer")
    }
}

/// The words of a line.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn text(&mut self) -> Result<&'a str> {
        self.0.next().context("the order is too short: a word is missing")
    }

    fn number<T: FromStr>(&mut self) -> Result<T> {
        let word = self.text()?;
        word.parse().map_err(|_| anyhow!("'{word}' is not a valid number"))
    }

    fn millis(&mut self) -> Result<Duration> {
        Ok(Duration::from_millis(self.number()?))
    }
}

/// Reports an engine error by its variant name, which the other side can search for.
fn typed<T, E: Debug>(result: std::result::Result<T, E>) -> Result<T> {
    result.map_err(|error| anyhow!("{error:?}"))
}

fn told(ended: Ended) -> String {
    format!("{:?} {:?}", ended.reason, ended.fence)
}
