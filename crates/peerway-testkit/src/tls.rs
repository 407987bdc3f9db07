//! TLS of hand-made peers, built outside the engine. It checks nothing that the other side sends:
//! a hostile peer accepts any key.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use peerway_core::ids::Incarnation;
use peerway_core::wire::Proof;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, DistinguishedName, Error,
    ServerConfig, ServerConnection, SignatureScheme,
};
use sha2::{Digest, Sha256};

use crate::random::Random;

/// The bytes before the secret of an Ed25519 key in PKCS #8 (RFC 8410).
const PKCS8_PREFIX: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// A key pair and the identity that it proves.
#[derive(Clone, Debug)]
pub struct Key {
    /// The identity.
    pub incarnation: Incarnation,
    certified: Arc<CertifiedKey>,
}

impl Key {
    /// Makes a key pair from seeded randomness.
    pub fn new(random: &mut Random) -> Result<Self> {
        let pkcs8 = [&PKCS8_PREFIX[..], &random.bytes(32)].concat();
        let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8))?;
        let public = key.public_key().context("no public key")?.to_vec();
        let incarnation = incarnation_of(&public);
        let certified = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], key));
        Ok(Self { incarnation, certified })
    }

    /// This key, shown under the public key of another endpoint. It cannot prove that one.
    pub fn disguised(&self, public_key: &[u8]) -> Self {
        let shown = vec![CertificateDer::from(public_key.to_vec())];
        let certified = Arc::new(CertifiedKey::new(shown, self.certified.key.clone()));
        Self { incarnation: incarnation_of(public_key), certified }
    }
}

fn incarnation_of(public_key: &[u8]) -> Incarnation {
    let hash = Sha256::digest(public_key);
    Incarnation(std::array::from_fn(|at| hash[at]))
}

/// The side that makes a proof.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// The side that connects.
    Opener,
    /// The side that listens.
    Acceptor,
}

/// TLS of one connection, without its socket.
pub struct Tls(Connection);

impl Tls {
    /// The opener's side.
    pub fn opener(key: &Key) -> Result<Self> {
        let resolver = AlwaysResolvesClientRawPublicKeys::new(key.certified.clone());
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Credulous))
            .with_client_cert_resolver(Arc::new(resolver));
        config.resumption = Resumption::disabled();
        let name = ServerName::from(IpAddr::from(Ipv4Addr::LOCALHOST));
        Ok(Self(ClientConnection::new(Arc::new(config), name)?.into()))
    }

    /// The acceptor's side.
    pub fn acceptor(key: &Key) -> Result<Self> {
        let resolver = AlwaysResolvesServerRawPublicKeys::new(key.certified.clone());
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(Credulous))
            .with_cert_resolver(Arc::new(resolver));
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self(ServerConnection::new(Arc::new(config))?.into()))
    }

    /// The bytes that TLS wants to send.
    pub fn output(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while self.0.wants_write() {
            self.0.write_tls(&mut bytes)?;
        }
        Ok(bytes)
    }

    /// Completes the handshake. Returns the identity of the other side.
    pub fn shake_hands(&mut self, stream: &mut TcpStream) -> Result<Incarnation> {
        loop {
            let output = self.output()?;
            stream.write_all(&output)?;
            if !self.0.is_handshaking() {
                break;
            }
            let record = read_record(stream).context("in the TLS handshake")?;
            self.take_in(&record)?;
        }
        Ok(incarnation_of(self.peer_key()?))
    }

    /// The public key of the other side.
    pub fn peer_key(&self) -> Result<&[u8]> {
        let keys = self.0.peer_certificates().context("the other side showed no key")?;
        Ok(keys.first().context("no key")?)
    }

    /// Encrypts bytes into records.
    pub fn encrypt(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.0.writer().write_all(bytes)?;
        self.output()
    }

    /// Reads exactly `buffer`. It reads whole records, and no byte beyond the last one.
    pub fn read_exact(&mut self, stream: &mut TcpStream, buffer: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.0.reader().read(&mut buffer[done..]) {
                Ok(0) => bail!("the endpoint ended TLS"),
                Ok(n) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let record = read_record(stream)?;
                    self.take_in(&record)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// A proof, as the engine makes it: see the book's page on the handshake.
    pub fn proof(
        &self,
        side: Side,
        session: &[u8; 16],
        purpose: &str,
        object: &[u8],
    ) -> Result<Proof> {
        let label = format!("EXPORTER-peerway-{purpose}");
        let context = [&[side as u8], &session[..], object].concat();
        Ok(self.0.export_keying_material([0; 32], label.as_bytes(), Some(&context))?)
    }

    fn take_in(&mut self, record: &[u8]) -> Result<()> {
        ensure!(self.0.read_tls(&mut &*record)? == record.len(), "TLS left bytes of a record");
        self.0.process_new_packets()?;
        Ok(())
    }
}

/// Reads one TLS record with its header.
pub fn read_record(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut record = vec![0; 5];
    stream.read_exact(&mut record).context("no TLS record")?;
    ensure!((20..=23).contains(&record[0]) && record[1] == 3, "no TLS record: {record:?}");
    let len = usize::from(u16::from_be_bytes([record[3], record[4]]));
    record.resize(5 + len, 0);
    stream.read_exact(&mut record[5..])?;
    Ok(record)
}

/// Accepts every key without a look at its signature.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Credulous {
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
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
