//! Certificates for a test, made by an authority of its own.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::TlsFiles;

/// Who signs certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(crate) struct Issued {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // Each has a name of its own, as theirs are found by it.
        let name = crate::http::uuid4();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Signs a certificate for a name or an address.
    pub(crate) fn issue(&self, name: &str) -> Issued {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        Issued {
            certificate: params.signed_by(&key, &self.0).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }
}

/// A folder for the files of a test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: &str) -> PathBuf {
        let path = self.path(name);
        fs_err::write(&path, contents).unwrap();
        path
    }

    /// Writes a certificate and its key into one file, the key first, as Kubernetes does.
    pub(crate) fn bundle(&self, name: &str, issued: &Issued) -> PathBuf {
        self.write(name, &format!("{}{}", issued.key, issued.certificate))
    }

    /// Returns the files of a client that trusts `root` and shows nothing.
    pub(crate) fn trusting(&self, root: &Authority) -> TlsFiles {
        TlsFiles {
            ca: Some(self.write("trusted.pem", &root.pem())),
            ..TlsFiles::default()
        }
    }
}
