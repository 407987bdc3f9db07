//! Tries every path between two endpoints on this host.

use std::path::Path;
use std::time::Instant;

use peerway::{Endpoint, PathKind, Pin};

use super::report::{Row, Section};

/// The section about the paths from this machine to itself.
pub(super) fn section(_root: &Path) -> Section {
    let mut section =
        Section::new("self", "Paths to this host, best first (tried with two endpoints)");
    for pin in [Pin::LocalMap, Pin::LocalCma, Pin::LocalRing, Pin::Tcp] {
        section.push(try_path(pin));
    }
    section
}

fn try_path(pin: Pin) -> Row {
    let tried = (|| -> Result<_, Box<dyn std::error::Error>> {
        let make = || Endpoint::builder().transport(pin).build();
        let (here, there) = (make()?, make()?);
        let start = Instant::now();
        let peer = here.connect(&there.metadata())?;
        Ok((peer.path().clone(), start.elapsed()))
    })();
    match tried {
        Ok((path, took)) => {
            let mut note = match path.is_trusted() {
                true => "same user only".to_owned(),
                false => "the owner checks every access".to_owned(),
            };
            if path.kind == PathKind::Tcp {
                note.push_str(&format!("; PEERWAY_DATA={} is in force", path.data));
            }
            Row::ok(
                pin.to_string(),
                format!("works, connected in {:.1} ms", took.as_secs_f64() * 1e3),
            )
            .note(note)
        }
        Err(error) => Row::attention(pin.to_string(), error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_to_itself_always_works() {
        let row = format!("{:?}", try_path(Pin::Tcp));
        assert!(row.contains("works") && row.contains("PEERWAY_DATA=off"), "{row}");
    }
}
