//! Admission: which endpoints may take part.
//!
//! After TLS, and before anything else is said, the opener shows that it may take part, and the
//! acceptor answers in the same way. What they show covers keying material that TLS exports for one
//! connection and one side. It is worth nothing on another connection, so it can be neither relayed
//! nor replayed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use peerway_core::config::{Config, IdentityMode};
use peerway_core::wire::{Admission as Shown, Proof};
use sha2::Sha256;

use super::certificates::{self, Certificates};
use super::{IdentityError, Side};

const SECRET_FILE: &str = "PEERWAY_CLUSTER_SECRET_FILE";
/// The shortest secret: 128 random bits in hexadecimal digits. A shorter one could be guessed by a
/// stranger that has seen one MAC.
const MIN_SECRET: usize = 32;
/// The longest file that is read.
const MAX_FILE: u64 = 64 << 10;

/// See the module.
pub(crate) enum Admission {
    /// Every endpoint may take part under its own identity.
    Pinned,
    /// Both sides know the secret of the cluster.
    Cluster(Secret),
    /// Both sides have a certificate of an authority.
    Mtls(Arc<Certificates>),
}

impl Admission {
    /// Reads what the settings name.
    pub(crate) fn new(config: &Config) -> Result<Self, IdentityError> {
        let mode = config.identity;
        let settings = [
            (SECRET_FILE, &config.cluster_secret_file, IdentityMode::Cluster),
            (certificates::CA_FILE, &config.tls_ca_file, IdentityMode::Mtls),
            (certificates::CERT_FILE, &config.tls_cert_file, IdentityMode::Mtls),
            (certificates::KEY_FILE, &config.tls_key_file, IdentityMode::Mtls),
        ];
        for (setting, path, needed) in settings {
            if path.is_some() && mode != needed {
                return Err(IdentityError::Unused { setting, mode, needed });
            }
        }
        let given = |setting, path: &Option<String>, what| {
            path.clone().ok_or(IdentityError::Missing { mode, setting, what })
        };
        Ok(match mode {
            IdentityMode::Cluster => {
                let what = "a file with a secret of at least 32 bytes";
                let path = given(SECRET_FILE, &config.cluster_secret_file, what)?;
                Self::Cluster(Secret::read(&path)?)
            }
            IdentityMode::Mtls => {
                let (ca, cert, key) = ("authorities", "a certificate", "its private key");
                Self::Mtls(Arc::new(Certificates::new([
                    given(certificates::CA_FILE, &config.tls_ca_file, ca)?,
                    given(certificates::CERT_FILE, &config.tls_cert_file, cert)?,
                    given(certificates::KEY_FILE, &config.tls_key_file, key)?,
                ])?))
            }
            _ => Self::Pinned,
        })
    }

    /// Whether both sides must show something.
    pub(crate) fn is_required(&self) -> bool {
        !matches!(self, Self::Pinned)
    }

    /// What a peer must do to be admitted.
    pub(crate) fn requirement(&self) -> &'static str {
        match self {
            Self::Pinned => "it admits every endpoint",
            Self::Cluster(_) => {
                "it admits only endpoints that prove the secret of its cluster \
                 (PEERWAY_IDENTITY=cluster)"
            }
            Self::Mtls(_) => {
                "it admits only endpoints with a certificate of its authority \
                 (PEERWAY_IDENTITY=mtls)"
            }
        }
    }

    /// What this endpoint shows. `exported` is keying material for its side of the connection.
    pub(crate) fn show(&self, side: Side, exported: &Proof) -> Result<Shown, String> {
        match self {
            Self::Pinned => Err(String::from("it has nothing to show (PEERWAY_IDENTITY=pinned)")),
            Self::Cluster(secret) => Ok(Shown::Secret(secret.mac(exported))),
            Self::Mtls(certificates) => certificates.show(side, exported),
        }
    }

    /// Checks what a peer shows. `exported` is keying material for its side of the connection.
    pub(crate) fn check(&self, side: Side, exported: &Proof, shown: &Shown) -> Result<(), String> {
        match (self, shown) {
            (Self::Cluster(secret), Shown::Secret(mac)) if secret.is_mac(exported, mac) => Ok(()),
            (Self::Cluster(_), Shown::Secret(_)) => {
                Err(format!("the two secrets differ ({SECRET_FILE})"))
            }
            (Self::Mtls(ours), Shown::Certificate { chain, scheme, signature }) => {
                ours.check(side, exported, chain, *scheme, signature)
            }
            (Self::Pinned, _) => Err(String::from(
                "it knows no secret and no certificates (PEERWAY_IDENTITY=pinned)",
            )),
            _ => Err(self.requirement().to_owned()),
        }
    }
}

/// The secret of a cluster.
pub(crate) struct Secret(Hmac<Sha256>);

impl Secret {
    fn read(path: &str) -> Result<Self, IdentityError> {
        let mut bytes = read_secret_file(SECRET_FILE, path)?;
        let secret = bytes.trim_ascii_end();
        if secret.len() < MIN_SECRET {
            let why = format!(
                "has {} bytes, and a secret needs at least {MIN_SECRET}; `openssl rand -hex 32` \
                 makes one",
                secret.len()
            );
            return Err(unusable(SECRET_FILE, path, why));
        }
        let keyed = Hmac::new_from_slice(secret);
        bytes.fill(0);
        let keyed = keyed.map_err(|error| unusable(SECRET_FILE, path, error.to_string()))?;
        Ok(Self(keyed))
    }

    fn over(&self, exported: &Proof) -> Hmac<Sha256> {
        self.0.clone().chain_update(exported)
    }

    fn mac(&self, exported: &Proof) -> Proof {
        self.over(exported).finalize().into_bytes().into()
    }

    /// Whether this is the MAC. The time does not depend on the bytes.
    fn is_mac(&self, exported: &Proof, mac: &Proof) -> bool {
        self.over(exported).verify_slice(mac).is_ok()
    }
}

/// Reads a file that should be known to this user alone.
pub(super) fn read_secret_file(
    setting: &'static str,
    path: &str,
) -> Result<Vec<u8>, IdentityError> {
    let bytes = read_file(setting, path)?;
    if fs::metadata(path).is_ok_and(|file| file.mode() & 0o077 != 0) {
        tracing::warn!(setting, path, "other users can read or change this file (chmod 600)");
    }
    Ok(bytes)
}

/// Reads a file that a setting names.
pub(super) fn read_file(setting: &'static str, path: &str) -> Result<Vec<u8>, IdentityError> {
    let unreadable =
        |source: io::Error| IdentityError::Unreadable { setting, path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(unusable(setting, path, format!("is longer than {MAX_FILE} bytes")));
    }
    Ok(bytes)
}

pub(super) fn unusable(setting: &'static str, path: &str, why: String) -> IdentityError {
    IdentityError::Unusable { setting, path: path.to_owned(), why }
}
