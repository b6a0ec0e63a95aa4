//! Certificates for the client of an upstream.

use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

use crate::http::tls::{Credentials, TlsError, check_client};

/// Says what the files hold in the client's own types. It looks at them when it first connects, and panics
/// at a key of another certificate, so they are checked here.
pub(super) fn tls_config(credentials: &Credentials) -> Result<TlsConfig, TlsError> {
    check_client(credentials)?;
    let owned = |der: &[u8]| Certificate::from_der(der).to_owned();
    let roots = match &credentials.roots {
        Some(roots) => RootCerts::from(roots.iter().map(|root| owned(root))),
        None => RootCerts::WebPki,
    };
    let identity = match &credentials.identity {
        Some(identity) => {
            let chain: Vec<_> = identity.chain.iter().map(|der| owned(der)).collect();
            let key = PrivateKey::from_pem(&identity.key_pem)
                .map_err(|error| TlsError::Read(error.into_io()))?;
            Some(ClientCert::new_with_certs(&chain, key))
        }
        None => None,
    };
    Ok(TlsConfig::builder()
        .root_certs(roots)
        .client_cert(identity)
        .build())
}
