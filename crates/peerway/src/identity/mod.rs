//! The identity of an endpoint: a key pair, and TLS that proves it.
//!
//! An endpoint makes an Ed25519 key pair when it starts. Its incarnation is the first half of the
//! SHA-256 hash of the public key, so metadata alone is enough to authenticate a peer. Both sides
//! prove their keys in a TLS 1.3 handshake with raw public keys (RFC 7250). An opener that knows
//! which peer it dials accepts only that key. The private key never leaves the process.
//!
//! Keys say which endpoint a peer is. Whether it may take part at all is the matter of
//! [`admission`].

pub(crate) mod admission;
mod certificates;
pub(crate) mod lanes;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, LazyLock};

use peerway_core::config::{Config, IdentityMode};
use peerway_core::ids::Incarnation;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName,
    Error, PeerIncompatible, ServerConfig, ServerConnection, SignatureScheme,
};
use sha2::{Digest, Sha256};

use crate::os::random;
use admission::Admission;

/// What precedes the 32 secret bytes of an Ed25519 key in PKCS #8 (RFC 8410, section 7): a
/// sequence of version 0, the algorithm 1.3.101.112, and an octet string in an octet string.
const PKCS8_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// One key exchange and two ciphers. Every build has them, so the first message is short and its
/// answer needs no second try.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
            ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![ring::kx_group::X25519],
        ..ring::default_provider()
    })
});

/// See the module.
pub(crate) struct Identity {
    pub(crate) incarnation: Incarnation,
    key: Arc<CertifiedKey>,
    accepting: Arc<ServerConfig>,
    pub(crate) admission: Admission,
}

/// The side of a connection that makes a proof. The other side's proof differs, so none can be
/// sent back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    Opener,
    Acceptor,
}

/// The endpoint has no identity.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The key pair could not be made.
    #[error("cannot make the key pair of the endpoint: {0}")]
    Key(String),
    /// A setting that the mode needs is absent.
    #[error("PEERWAY_IDENTITY={mode} needs {setting}: {what}")]
    Missing {
        /// The mode.
        mode: IdentityMode,
        /// The absent setting.
        setting: &'static str,
        /// What it must name.
        what: &'static str,
    },
    /// A setting has no effect in this mode. The endpoint would admit more than its user expects.
    #[error("{setting} has no effect with PEERWAY_IDENTITY={mode}: set PEERWAY_IDENTITY={needed}")]
    Unused {
        /// The setting.
        setting: &'static str,
        /// The mode.
        mode: IdentityMode,
        /// The mode that uses it.
        needed: IdentityMode,
    },
    /// A file cannot be read.
    #[error("cannot read {setting}={path}: {source}")]
    Unreadable {
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{setting}={path} {why}")]
    Unusable {
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
}

impl From<Error> for IdentityError {
    fn from(error: Error) -> Self {
        Self::Key(error.to_string())
    }
}

impl Identity {
    /// Makes a key pair, and reads what the settings name for admission.
    pub(crate) fn new(config: &Config) -> Result<Self, IdentityError> {
        let admission = Admission::new(config)?;
        let mut pkcs8 = [&PKCS8_PREFIX[..], &random::<32>()].concat();
        let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_slice()));
        pkcs8.fill(0);
        let key = key?;
        let public = key.public_key().ok_or(Error::General("the key has no public half".into()))?;
        let incarnation = incarnation_of(&public);
        // With raw public keys the certificate is the public key itself.
        let public = CertificateDer::from(public.to_vec());
        let key = Arc::new(CertifiedKey::new(vec![public], key));
        let mut accepting = ServerConfig::builder_with_provider(PROVIDER.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(AnyKey))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key.clone())));
        // A ticket would be a TLS record after the handshake that no side reads. Lanes join a
        // session by a proof from its first connection.
        accepting.send_tls13_tickets = 0;
        accepting.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        Ok(Self { incarnation, key, accepting: Arc::new(accepting), admission })
    }

    /// An identity with a chosen name, for simulated endpoints that make no connection.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn named(incarnation: Incarnation) -> Self {
        Self { incarnation, ..Self::new(&Config::default()).unwrap() }
    }

    /// TLS of an acceptor, for one connection.
    pub(crate) fn accept(&self) -> Result<ServerConnection, Error> {
        ServerConnection::new(self.accepting.clone())
    }

    /// TLS of an opener, for one connection. The handshake fails unless the acceptor proves the
    /// incarnation that the opener `expects`.
    pub(crate) fn open(&self, expects: Option<Incarnation>) -> Result<ClientConnection, Error> {
        let mut opening = ClientConfig::builder_with_provider(PROVIDER.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ExpectedKey(expects)))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                self.key.clone(),
            )));
        opening.resumption = Resumption::disabled();
        opening.enable_sni = false;
        // The key names the peer. TLS wants a name for certificates, which this one stands in for.
        let name = ServerName::from(IpAddr::from(Ipv4Addr::UNSPECIFIED));
        ClientConnection::new(Arc::new(opening), name)
    }
}

/// The incarnation that a public key proves.
pub(crate) fn incarnation_of(public_key: &[u8]) -> Incarnation {
    let hash = Sha256::digest(public_key);
    Incarnation(std::array::from_fn(|at| hash[at]))
}

/// Whether a handshake failed because the acceptor proved another key than the expected one.
pub(crate) fn is_other_identity(error: &Error) -> bool {
    *error == Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
}

/// Checks that the peer has the private half of the key that it shows.
fn verify(
    message: &[u8],
    key: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    let key = SubjectPublicKeyInfoDer::from(key.as_ref());
    let algorithms = &PROVIDER.signature_verification_algorithms;
    if signature.scheme != SignatureScheme::ED25519 {
        return Err(PeerIncompatible::NoSignatureSchemesInCommon.into());
    }
    verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
}

/// The build has no TLS 1.2, so nothing asks for its signatures.
fn no_tls12() -> Error {
    PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig.into()
}

/// The opener's rule: the acceptor has the expected key, or any key if the opener knows only an
/// address.
#[derive(Debug)]
struct ExpectedKey(Option<Incarnation>);

impl ServerCertVerifier for ExpectedKey {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.0 {
            Some(expected) if incarnation_of(key) != expected => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The acceptor's rule: the opener has some key. It is the opener's identity.
#[derive(Debug)]
struct AnyKey;

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
