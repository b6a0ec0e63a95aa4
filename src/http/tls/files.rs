//! The files that certificates, keys and roots are read from.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};

use super::TlsError;

/// Largest file that is read; a bundle of all public roots is a quarter of it.
const MAX_BYTES: u64 = 1 << 20;

/// The files of one side, in PEM. What is in them beside what is looked for does not count, so that one file
/// may hold a key and its certificates, as Kubernetes writes them (`podCertificate`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// This side's certificate, followed by those between it and its root. A client needs none unless it is
    /// asked for one.
    pub certificate: Option<PathBuf>,
    /// Its private key. Default: in the certificate's file.
    pub key: Option<PathBuf>,
    /// The roots that the other side's certificate must lead to. Default: those of the web for a client; a
    /// server asks for no certificate.
    pub ca: Option<PathBuf>,
}

/// Who this side is.
pub(crate) struct Identity {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
    /// The file that the key is in, for clients that read it themselves.
    pub(crate) key_pem: Vec<u8>,
}

/// What the files hold.
pub(crate) struct Credentials {
    pub(crate) identity: Option<Identity>,
    /// At least one, if they are given; all can be used.
    pub(crate) roots: Option<Vec<CertificateDer<'static>>>,
}

/// The files as they are.
pub(super) struct Contents {
    certificate: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
    ca: Option<Vec<u8>>,
}

impl TlsFiles {
    /// Returns whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn read(&self) -> Result<Contents, TlsError> {
        let read = |path: &Option<PathBuf>| path.as_deref().map(read_file).transpose();
        Ok(Contents {
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
            ca: read(&self.ca)?,
        })
    }

    pub(super) fn parse(&self, contents: &Contents) -> Result<Credentials, TlsError> {
        let identity = match (&self.certificate, &contents.certificate) {
            (Some(path), Some(certificate)) => {
                let (key_path, key) = match (&self.key, &contents.key) {
                    (Some(path), Some(key)) => (path, key),
                    _ => (path, certificate),
                };
                Some(Identity {
                    chain: certificates(path, certificate)?,
                    key: key_of(key_path, key)?,
                    key_pem: key.clone(),
                })
            }
            _ => match &self.key {
                Some(key) => return Err(TlsError::KeyAlone { key: key.clone() }),
                None => None,
            },
        };
        let roots = match (&self.ca, &contents.ca) {
            (Some(path), Some(ca)) => Some(roots(path, certificates(path, ca)?)?),
            _ => None,
        };
        Ok(Credentials { identity, roots })
    }
}

impl Contents {
    /// Returns what tells these from others.
    pub(super) fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for part in [&self.certificate, &self.key, &self.ca] {
            let part = part.as_deref().unwrap_or_default();
            hasher.update(blake3::hash(part).as_bytes());
        }
        hasher.finalize()
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    // A pipe would be waited for.
    if !fs_err::metadata(path)?.is_file() {
        return Err(TlsError::NoFile {
            path: path.to_owned(),
        });
    }
    let mut contents = Vec::new();
    fs_err::File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut contents)?;
    if contents.len() as u64 > MAX_BYTES {
        return Err(TlsError::TooLarge {
            path: path.to_owned(),
            limit: MAX_BYTES,
        });
    }
    Ok(contents)
}

/// Reads all objects of a kind.
fn objects<T: PemObject>(path: &Path, contents: &[u8]) -> Result<Vec<T>, TlsError> {
    T::pem_slice_iter(contents)
        .collect::<Result<_, pem::Error>>()
        .map_err(|source| TlsError::Pem {
            path: path.to_owned(),
            source,
        })
}

fn certificates(path: &Path, contents: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Vec<_> = objects(path, contents)?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate {
            path: path.to_owned(),
        });
    }
    Ok(certificates)
}

/// Keeps the roots that can be used: bundles of many have some of an old kind.
fn roots(
    path: &Path,
    mut certificates: Vec<CertificateDer<'static>>,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let mut refused = None;
    certificates.retain(|certificate| {
        let added = RootCertStore::empty().add(certificate.clone());
        added.map_err(|error| refused = Some(error)).is_ok()
    });
    match refused {
        Some(source) if certificates.is_empty() => Err(TlsError::Root {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(certificates),
    }
}

fn key_of(path: &Path, contents: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    let keys: Vec<_> = objects(path, contents)?;
    keys.into_iter().next().ok_or_else(|| TlsError::NoKey {
        path: path.to_owned(),
    })
}
