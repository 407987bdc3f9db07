//! Which endpoints may take part: `PEERWAY_IDENTITY`.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use peerway::{BuildError, Builder, ConnectError, Endpoint, IdentityError, Pin};
use peerway_core::wire::{Admission, Control, Refusal};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control};

/// Longest wait for something that must happen.
const WATCHDOG: Duration = Duration::from_secs(30);
const SECRET: &str = "PEERWAY_CLUSTER_SECRET_FILE";

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("peerway-admission-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        std::fs::File::create(&path).unwrap().write_all(content.as_ref()).unwrap();
        text(&path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

fn builder() -> Builder {
    Endpoint::builder().transport(Pin::Tcp)
}

fn of_cluster(secret: &str) -> Endpoint {
    builder().setting("PEERWAY_IDENTITY", "cluster").setting(SECRET, secret).build().unwrap()
}

/// The sentence with which one of the two does not admit the other.
fn not_admitted(from: &Endpoint, to: &Endpoint) -> String {
    for result in [from.connect(&to.metadata()), from.connect_addr(to.addresses()[0])] {
        let error = result.unwrap_err();
        assert!(matches!(error, ConnectError::NotAdmitted { .. }), "{error:?}");
    }
    assert!(from.peers().is_empty() && to.accept(Duration::ZERO).is_err());
    from.connect(&to.metadata()).unwrap_err().to_string()
}

#[test]
fn endpoints_of_one_cluster_reach_each_other_and_no_others() {
    let folder = Folder::new();
    // White space at the end does not count.
    let ours = folder.file("ours", "0123456789abcdef0123456789abcdef");
    let same = folder.file("same", "0123456789abcdef0123456789abcdef\n");
    let other = folder.file("other", "0123456789abcdef0123456789abcdeX");
    let (a, b) = (of_cluster(&ours), of_cluster(&same));
    let (stranger, open) = (of_cluster(&other), builder().build().unwrap());

    assert!(not_admitted(&stranger, &b).contains("secrets differ"));
    assert!(not_admitted(&b, &stranger).contains("secrets differ"));
    assert!(not_admitted(&open, &b).contains("PEERWAY_IDENTITY=cluster"));
    assert!(not_admitted(&b, &open).contains("PEERWAY_IDENTITY=pinned"));

    let peer = a.connect(&b.metadata()).unwrap();
    peer.notify(b"member").unwrap().join().ok().unwrap();
    assert_eq!(b.notification(WATCHDOG).unwrap().message, b"member");
    a.remove_peer(&peer);
    assert_eq!(
        of_cluster(&same).connect_addr(b.addresses()[0]).unwrap().incarnation(),
        b.incarnation()
    );
}

#[test]
fn a_mac_is_worth_nothing_on_another_connection_or_back_to_its_maker() {
    let folder = Folder::new();
    let secret = folder.file("secret", [7; 32]);
    let (a, b) = (of_cluster(&secret), of_cluster(&secret));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let middle = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut near = Raw::over(stream, &mut Random::new(1)).unwrap();
        near.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        near.secure_as_acceptor().unwrap();
        let asked = near.control().unwrap();
        // The man in the middle has no secret, so it sends back what it got.
        near.send(&control(&asked)).unwrap();
        let ended = near.control();
        (asked, ended.is_err())
    });
    let error = a.connect_addr(addr).unwrap_err();
    assert!(matches!(error, ConnectError::NotAdmitted { .. }), "{error:?}");
    let (mac, ended) = middle.join().unwrap();
    assert!(matches!(mac, Control::Admit(Admission::Secret(_))), "{mac:?}");
    assert!(ended, "the opener said more to an acceptor without the secret");

    for shown in [mac, Control::Admit(Admission::Secret([0; 32]))] {
        let mut far = Raw::connect(b.addresses()[0], &mut Random::new(2)).unwrap();
        far.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        far.secure().unwrap();
        far.send(&control(&shown)).unwrap();
        let answer = far.control().unwrap();
        assert!(matches!(answer, Control::Refuse(Refusal::NotAdmitted(_))), "{answer:?}");
        assert!(far.is_hung_up(WATCHDOG));
    }
    // Without a MAC there is no welcome either.
    let mut far = Raw::connect(b.addresses()[0], &mut Random::new(3)).unwrap();
    assert!(far.greet().is_err());
    assert!(b.peers().is_empty());
}

/// The error of an endpoint with these settings.
fn refused(settings: &[(&str, &str)]) -> (BuildError, String) {
    let with = |builder: Builder, (name, value): &(&str, &str)| builder.setting(*name, *value);
    let error = settings.iter().fold(builder(), with).build().unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[test]
fn settings_that_cannot_be_met_are_errors_in_a_sentence() {
    let folder = Folder::new();
    let mode = ("PEERWAY_IDENTITY", "cluster");
    let (_, text) = refused(&[("PEERWAY_IDENTITY", "anybody")]);
    assert!(text.contains("anybody") && text.contains("pinned or cluster"), "{text}");
    let (error, text) = refused(&[mode]);
    assert!(matches!(error, BuildError::Identity(IdentityError::Missing { .. })), "{error:?}");
    assert!(text.contains(SECRET), "{text}");
    let (error, text) = refused(&[mode, (SECRET, "/nowhere/secret")]);
    assert!(matches!(error, BuildError::Identity(IdentityError::Unreadable { .. })), "{error:?}");
    assert!(text.contains("/nowhere/secret"), "{text}");
    let short = folder.file("short", [b'x'; 31]);
    let (error, text) = refused(&[mode, (SECRET, &short)]);
    assert!(matches!(error, BuildError::Identity(IdentityError::Unusable { .. })), "{error:?}");
    assert!(text.contains("31 bytes") && text.contains(&short), "{text}");
    let long = folder.file("long", vec![b'x'; 100_000]);
    assert!(refused(&[mode, (SECRET, &long)]).1.contains("longer than"));
    // A secret that nothing asks for would be a false sense of security.
    let good = folder.file("good", [b'x'; 32]);
    let (error, text) = refused(&[(SECRET, &good)]);
    assert!(matches!(error, BuildError::Identity(IdentityError::Unused { .. })), "{error:?}");
    assert!(text.contains("PEERWAY_IDENTITY=cluster"), "{text}");
}
