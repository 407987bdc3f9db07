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
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

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
    let is_known = |at: &Endpoint, who: &Endpoint| {
        at.peers().iter().any(|peer| peer.incarnation() == who.incarnation())
    };
    assert!(!is_known(from, to) && !is_known(to, from));
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
    // The man in the middle has no secret, so it sends back what it got.
    let mac = shown_by(&a);
    assert!(matches!(mac, Control::Admit(Admission::Secret(_))), "{mac:?}");

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

/// An authority that makes certificates.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Writes the files of a new endpoint: the authority, a certificate and its key.
    fn write(&self, folder: &Folder, name: &str, until: i32) -> [String; 3] {
        let mut params = CertificateParams::new([String::from("worker")]).unwrap();
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        [
            folder.file(&format!("{name}.ca"), &self.pem),
            folder.file(&format!("{name}.cert"), certificate.pem()),
            folder.file(&format!("{name}.key"), key.serialize_pem()),
        ]
    }
}

const VALID: i32 = 4000;
const MTLS: (&str, &str) = ("PEERWAY_IDENTITY", "mtls");
const FILES: [&str; 3] = ["PEERWAY_TLS_CA_FILE", "PEERWAY_TLS_CERT_FILE", "PEERWAY_TLS_KEY_FILE"];

fn with_certificate(files: &[String; 3]) -> Endpoint {
    let settings = FILES.iter().zip(files);
    let set = |builder: Builder, (name, value): (&&str, &String)| builder.setting(*name, value);
    settings.fold(builder().setting(MTLS.0, MTLS.1), set).build().unwrap()
}

#[test]
fn certificates_of_one_authority_admit_and_no_others() {
    let folder = Folder::new();
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let b = with_certificate(&ours.write(&folder, "b", VALID));
    let a = with_certificate(&ours.write(&folder, "a", VALID));
    let stranger = with_certificate(&theirs.write(&folder, "stranger", VALID));
    let expired = with_certificate(&ours.write(&folder, "expired", 2021));
    let open = builder().build().unwrap();
    let secret = of_cluster(&folder.file("secret", [7; 32]));

    for (from, to) in [(&stranger, &b), (&b, &stranger), (&expired, &b), (&b, &expired)] {
        let text = not_admitted(from, to);
        assert!(text.contains("certificate is not accepted"), "{text}");
    }
    assert!(not_admitted(&open, &b).contains("PEERWAY_IDENTITY=mtls"));
    assert!(not_admitted(&secret, &b).contains("PEERWAY_IDENTITY=mtls"));
    assert!(not_admitted(&b, &secret).contains("PEERWAY_IDENTITY=cluster"));
    assert!(not_admitted(&b, &open).contains("PEERWAY_IDENTITY=pinned"));
    assert_eq!(a.connect(&b.metadata()).unwrap().incarnation(), b.incarnation());
    assert_eq!(b.accept(WATCHDOG).unwrap().incarnation(), a.incarnation());
}

/// What an endpoint shows to an acceptor of another kind. The acceptor sends it back.
fn shown_by(opener: &Endpoint) -> Control {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let middle = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut near = Raw::over(stream, &mut Random::new(1)).unwrap();
        near.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        near.secure_as_acceptor().unwrap();
        let asked = near.control().unwrap();
        near.send(&control(&asked)).unwrap();
        assert!(
            near.control().is_err(),
            "the opener said more to an acceptor that is not admitted"
        );
        asked
    });
    let error = opener.connect_addr(addr).unwrap_err();
    assert!(matches!(error, ConnectError::NotAdmitted { .. }), "{error:?}");
    middle.join().unwrap()
}

#[test]
fn a_certificate_proves_nothing_without_its_key() {
    let folder = Folder::new();
    let authority = Authority::new("ours");
    let (a, b) = (authority.write(&folder, "a", VALID), authority.write(&folder, "b", VALID));
    let (a, b) = (with_certificate(&a), with_certificate(&b));
    let shown = shown_by(&a);
    assert!(matches!(shown, Control::Admit(Admission::Certificate { .. })), "{shown:?}");
    let mut thief = Raw::connect(b.addresses()[0], &mut Random::new(2)).unwrap();
    thief.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    thief.secure().unwrap();
    thief.send(&control(&shown)).unwrap();
    let answer = thief.control().unwrap();
    let Control::Refuse(Refusal::NotAdmitted(why)) = &answer else { panic!("{answer:?}") };
    assert!(why.contains("does not have the key"), "{why}");
    assert!(thief.is_hung_up(WATCHDOG) && b.peers().is_empty());
}

#[test]
fn changed_certificates_are_read_again() {
    let folder = Folder::new();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let b = with_certificate(&old.write(&folder, "b", VALID));
    let of_old = with_certificate(&old.write(&folder, "of_old", VALID));
    let of_new = with_certificate(&new.write(&folder, "of_new", VALID));
    of_old.remove_peer(&of_old.connect(&b.metadata()).unwrap());
    not_admitted(&of_new, &b);
    // An unusable change keeps the old certificates.
    folder.file("b.cert", "nothing");
    of_old.remove_peer(&of_old.connect(&b.metadata()).unwrap());
    new.write(&folder, "b", VALID);
    let start = std::time::Instant::now();
    while let Err(error) = of_new.connect(&b.metadata()) {
        assert!(matches!(error, ConnectError::NotAdmitted { .. }), "{error:?}");
        assert!(start.elapsed() < WATCHDOG, "the new authority is not known: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    // As an opener too.
    let fresh = with_certificate(&new.write(&folder, "fresh", VALID));
    assert!(b.connect(&fresh.metadata()).is_ok());
    let stale = with_certificate(&old.write(&folder, "stale", VALID));
    not_admitted(&stale, &b);
}

#[test]
fn unusable_certificates_are_errors_in_a_sentence() {
    let folder = Folder::new();
    let authority = Authority::new("ours");
    let [ca, cert, key] = &authority.write(&folder, "good", VALID);
    let [_, _, other] = &authority.write(&folder, "other", VALID);
    let text = folder.file("text", "nothing");
    let with =
        |ca, cert, key| refused(&[MTLS, (FILES[0], ca), (FILES[1], cert), (FILES[2], key)]).1;
    let (error, told) = refused(&[MTLS, (FILES[0], ca), (FILES[1], cert)]);
    assert!(matches!(error, BuildError::Identity(IdentityError::Missing { .. })), "{error:?}");
    assert!(told.contains(FILES[2]), "{told}");
    assert!(with(ca, cert, other).contains("not the key of the certificate"));
    assert!(with(&text, cert, key).contains("has no certificate"));
    assert!(with(ca, &text, key).contains("has no certificate"));
    assert!(with(ca, cert, &text).contains("has no usable key"));
    assert!(with(ca, cert, "/nowhere/key").contains("cannot read"));
    assert!(refused(&[(FILES[0], ca)]).1.contains("PEERWAY_IDENTITY=mtls"));
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
    assert!(text.contains("anybody") && text.contains("pinned, cluster or mtls"), "{text}");
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
