//! TLS for servers and clients: certificates from PEM files, which are read again when they change.
//!
//! [`ServerTls`] secures connections that were accepted, [`ClientTls`] those that were opened. Both are made
//! of [`TlsFiles`], and look whether those changed at a handshake, at most once a second: what is open goes
//! on, and what comes next has the new certificate. Files that cannot be used change nothing.
//!
//! TLS 1.3 and 1.2, by rustls with ring. A certificate that was revoked is good until it expires or its
//! root goes: lists of revoked ones are not read.

mod client;
mod files;
mod reload;
mod server;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod tests_support;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem;
use rustls::server::VerifierBuilderError;
use rustls::{RootCertStore, crypto};

pub use self::client::ClientTls;
pub(crate) use self::client::check_client;
pub(crate) use self::files::Credentials;
pub use self::files::TlsFiles;
pub(crate) use self::reload::Reloading;
pub use self::server::ServerTls;

/// How long a handshake may take.
pub(crate) const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// The protocol over TLS, as the extension ALPN names it (RFC 7301).
const HTTP: &[u8] = b"http/1.1";

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("a file of certificates could not be read")]
    Read(#[from] io::Error),
    /// It is a folder, a pipe or a device.
    #[error("`{path}` is no file")]
    NoFile {
        /// What is no file.
        path: PathBuf,
    },
    /// It is larger than any that is read.
    #[error("`{path}` is larger than {limit} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest that is read.
        limit: u64,
    },
    /// It is not PEM.
    #[error("`{path}` is not PEM")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: pem::Error,
    },
    /// It has no certificate.
    #[error("`{path}` holds no certificate")]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// It has no private key.
    #[error(
        "`{path}` holds no private key; name the key's file, too (`--tls-key` beside `--tls-cert`, `key` beside \
         `certificate`); one that a passphrase protects is not read"
    )]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// A server has nothing to show.
    #[error("a server needs a certificate")]
    NoIdentity,
    /// There is a key and nothing that it is the key of.
    #[error("`{key}` is a key without a certificate")]
    KeyAlone {
        /// The key's file.
        key: PathBuf,
    },
    /// None of the roots can be used.
    #[error("no root in `{path}` can be used")]
    Root {
        /// The file.
        path: PathBuf,
        /// What is wrong with the last.
        #[source]
        source: rustls::Error,
    },
    /// The certificate and the key do not fit each other, or are of a kind that is not known.
    #[error("the certificate cannot be used")]
    Identity(#[source] rustls::Error),
    /// No certificate of a client could be checked.
    #[error("certificates of clients cannot be checked")]
    Verifier(#[from] VerifierBuilderError),
    /// A certificate cannot be for this.
    #[error("`{host}` is no name or address that a certificate could be for")]
    Host {
        /// What is none.
        host: String,
    },
    /// The other side refused, is not who it should be, or speaks something else.
    #[error("no TLS connection to `{host}`")]
    Handshake {
        /// Whom it should be to.
        host: String,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// The other side took too long.
    #[error("no TLS connection to `{host}` within {limit:?}")]
    Late {
        /// Whom it should be to.
        host: String,
        /// How long it may take.
        limit: Duration,
    },
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(crypto::ring::default_provider())
}

fn root_store(roots: &[CertificateDer<'static>]) -> RootCertStore {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    store
}
