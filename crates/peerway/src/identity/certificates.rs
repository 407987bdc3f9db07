//! Certificates for [`admission`](super::admission): an authority, the certificate of this endpoint
//! and its key.
//!
//! An endpoint signs keying material of the TLS connection with the key of its certificate, and the
//! other side checks the signature and the chain. The certificate says only that the endpoint may
//! take part. Many endpoints may share one, and its names do not matter; the identity of an
//! endpoint is its own key.
//!
//! Certificates are short-lived in many clusters, so the files are read again when they change. The
//! acceptor serves many connections and must not wait for a file: a thread looks, at most once a
//! second, and the next connect uses what it found.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use peerway_core::wire::{Admission as Shown, Proof};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::SigningKey;
use rustls::{RootCertStore, SignatureScheme};
use webpki::EndEntityCert;

use super::admission::{read_file, read_secret_file, unusable};
use super::{IdentityError, PROVIDER, Side};
use crate::clock;
use crate::worker::FILES;

pub(super) const CA_FILE: &str = "PEERWAY_TLS_CA_FILE";
pub(super) const CERT_FILE: &str = "PEERWAY_TLS_CERT_FILE";
pub(super) const KEY_FILE: &str = "PEERWAY_TLS_KEY_FILE";

/// Precedes the signed bytes, so that the signature serves no other protocol.
const PURPOSE: &[u8] = b"peerway admission by certificate\0";
/// The shortest time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The most certificates in a chain.
const MAX_CHAIN: usize = 8;
/// The most bytes in a chain. With the signature it must fit in one control message.
const MAX_CHAIN_BYTES: usize = 12 << 10;

/// See the module.
pub(crate) struct Certificates {
    /// The authorities, the certificate and the key.
    paths: [String; 3],
    current: Mutex<Arc<Loaded>>,
    /// The state of the files at the last look, so that one bad change is one warning.
    seen: Mutex<Option<Stamps>>,
    next_look: AtomicU64,
}

/// What identifies a version of each file: device, number, length and time of change.
type Stamps = [(u64, u64, u64, i64, i64); 3];

/// What the files hold.
struct Loaded {
    roots: RootCertStore,
    /// Checks certificates of openers.
    openers: Arc<dyn ClientCertVerifier>,
    chain: Vec<Vec<u8>>,
    key: Arc<dyn SigningKey>,
}

impl Certificates {
    /// Reads the files.
    pub(super) fn new(paths: [String; 3]) -> Result<Self, IdentityError> {
        let seen = stamps(&paths);
        let loaded = Loaded::read(&paths)?;
        Ok(Self {
            paths,
            current: Mutex::new(Arc::new(loaded)),
            seen: Mutex::new(seen),
            next_look: AtomicU64::new(0),
        })
    }

    /// Signs keying material of this side.
    pub(super) fn show(self: &Arc<Self>, side: Side, exported: &Proof) -> Result<Shown, String> {
        // The opener blocks anyway. The acceptor has looked when it checked the opener.
        if side == Side::Opener {
            self.look();
        }
        let loaded = self.loaded();
        let known: Vec<SignatureScheme> =
            PROVIDER.signature_verification_algorithms.mapping.iter().map(|(s, _)| *s).collect();
        let signer = loaded.key.choose_scheme(&known).ok_or("its key has no known algorithm")?;
        let signature = signer.sign(&[PURPOSE, exported].concat()).map_err(|e| e.to_string())?;
        let scheme = signer.scheme().into();
        Ok(Shown::Certificate { chain: loaded.chain.clone(), scheme, signature })
    }

    /// Checks the chain and the signature that the other side shows.
    pub(super) fn check(
        self: &Arc<Self>,
        side: Side,
        exported: &Proof,
        chain: &[Vec<u8>],
        scheme: u16,
        signature: &[u8],
    ) -> Result<(), String> {
        if side == Side::Opener {
            self.look_soon();
        }
        let loaded = self.loaded();
        let chain: Vec<CertificateDer<'_>> =
            chain.iter().map(|der| CertificateDer::from(der.as_slice())).collect();
        let (first, rest) = chain.split_first().ok_or("it shows no certificate")?;
        if rest.len() >= MAX_CHAIN {
            return Err(String::from("its chain of certificates is too long"));
        }
        let refused = |error: rustls::Error| format!("its certificate is not accepted: {error}");
        let now = UnixTime::now();
        let algorithms = &PROVIDER.signature_verification_algorithms;
        match side {
            Side::Opener => {
                loaded.openers.verify_client_cert(first, rest, now).map_err(refused)?;
            }
            Side::Acceptor => {
                let parsed = ParsedCertificate::try_from(first).map_err(refused)?;
                let (roots, all) = (&loaded.roots, algorithms.all);
                verify_server_cert_signed_by_trust_anchor(&parsed, roots, rest, now, all)
                    .map_err(refused)?;
            }
        }
        let scheme = SignatureScheme::from(scheme);
        let mut mapping = algorithms.mapping.iter();
        let (_, algorithms) = mapping
            .find(|(known, _)| *known == scheme)
            .ok_or("its signature has an unknown algorithm")?;
        let certificate = EndEntityCert::try_from(first).map_err(|error| error.to_string())?;
        let signed = [PURPOSE, exported].concat();
        let is_signed = algorithms
            .iter()
            .any(|algorithm| certificate.verify_signature(*algorithm, &signed, signature).is_ok());
        if is_signed {
            Ok(())
        } else {
            Err(String::from("it does not have the key of the certificate that it shows"))
        }
    }

    fn loaded(&self) -> Arc<Loaded> {
        self.current.lock().unwrap().clone()
    }

    /// Looks at the files in another thread, unless that has just happened.
    fn look_soon(self: &Arc<Self>) {
        let now = clock::now();
        let due = self.next_look.load(Ordering::Relaxed);
        if now < due {
            return;
        }
        self.next_look.store(clock::after(now, LOOK_EVERY), Ordering::Relaxed);
        let this = self.clone();
        FILES.run(move || this.look());
    }

    /// Reads the files again if they have changed. If they are not usable, the last ones that were
    /// stay in use: the three files of a change may be replaced one after the other.
    fn look(&self) {
        let now = stamps(&self.paths);
        let mut seen = self.seen.lock().unwrap();
        if *seen == now {
            return;
        }
        match Loaded::read(&self.paths) {
            Ok(loaded) => {
                *self.current.lock().unwrap() = Arc::new(loaded);
                tracing::info!(file = self.paths[1], "read changed certificates");
            }
            Err(error) => {
                tracing::warn!(%error, "changed certificates are not usable; the old ones stay");
            }
        }
        *seen = now;
    }
}

impl Loaded {
    fn read(paths: &[String; 3]) -> Result<Self, IdentityError> {
        let [ca, cert, key] = paths;
        let mut roots = RootCertStore::empty();
        for root in certificates(CA_FILE, ca)? {
            roots.add(root).map_err(|error| unusable(CA_FILE, ca, format!("is bad: {error}")))?;
        }
        let authorities = Arc::new(roots.clone());
        let openers = WebPkiClientVerifier::builder_with_provider(authorities, PROVIDER.clone())
            .build()
            .map_err(|error| unusable(CA_FILE, ca, format!("is bad: {error}")))?;
        let chain = certificates(CERT_FILE, cert)?;
        if chain.len() > MAX_CHAIN || chain.iter().map(|c| c.len()).sum::<usize>() > MAX_CHAIN_BYTES
        {
            return Err(unusable(CERT_FILE, cert, String::from("has too long a chain")));
        }
        let mut pem = read_secret_file(KEY_FILE, key)?;
        let parsed = PrivateKeyDer::from_pem_slice(&pem);
        pem.fill(0);
        let bad = |why: String| unusable(KEY_FILE, key, format!("has no usable key: {why}"));
        let parsed = parsed.map_err(|error| bad(error.to_string()))?;
        let signing = PROVIDER.key_provider.load_private_key(parsed);
        let signing = signing.map_err(|error| bad(error.to_string()))?;
        let first = ParsedCertificate::try_from(&chain[0])
            .map_err(|error| unusable(CERT_FILE, cert, format!("is bad: {error}")))?;
        if signing.public_key().is_some_and(|public| public != first.subject_public_key_info()) {
            return Err(bad(format!("it is not the key of the certificate in {cert}")));
        }
        let chain = chain.iter().map(|certificate| certificate.to_vec()).collect();
        Ok(Self { roots, openers, chain, key: signing })
    }
}

/// The certificates in a PEM file, at least one.
fn certificates(
    setting: &'static str,
    path: &str,
) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let pem = read_file(setting, path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(unusable(setting, path, String::from("has no certificate in PEM"))),
        Err(error) => Err(unusable(setting, path, format!("is not PEM: {error}"))),
    }
}

fn stamps(paths: &[String; 3]) -> Option<Stamps> {
    let stamp = |path: &String| {
        let file = fs::metadata(path).ok()?;
        Some((file.dev(), file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
    };
    let [ca, cert, key] = paths;
    Some([stamp(ca)?, stamp(cert)?, stamp(key)?])
}
