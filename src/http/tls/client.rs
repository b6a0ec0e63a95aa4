//! The client's side.

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{
    Credentials, HANDSHAKE_WITHIN, HTTP, Reloading, TlsError, TlsFiles, provider, root_store,
};

/// Whom a client trusts, and what it shows where it is asked.
#[derive(Debug)]
pub struct ClientTls {
    config: Reloading<ClientConfig>,
}

impl ClientTls {
    /// Reads the files, of which there may be none: then the roots of the web are trusted.
    ///
    /// # Errors
    ///
    /// Fails where the files cannot be used.
    pub fn new(files: TlsFiles) -> Result<Self, TlsError> {
        Ok(Self {
            config: Reloading::new(files, client_config)?,
        })
    }

    /// As [`Self::new`], for connections that speak HTTP/2.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`].
    #[cfg(feature = "k8s")]
    pub(crate) fn http2(files: TlsFiles) -> Result<Self, TlsError> {
        let make = |credentials: &Credentials| {
            let mut config = client_config(credentials)?;
            config.alpn_protocols = vec![b"h2".to_vec()];
            Ok(config)
        };
        Ok(Self {
            config: Reloading::new(files, make)?,
        })
    }

    /// Secures a connection to `host`, a name or an address without a port, which the server's certificate
    /// must be for.
    ///
    /// A server that refuses *this* side's certificate may say so only when something is read: in TLS 1.3 the
    /// client is done first. Dropped, the future closes the connection.
    ///
    /// # Errors
    ///
    /// Fails where the server cannot show that it is `host`, or is not done within ten seconds.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        host: &str,
        stream: S,
    ) -> Result<TlsStream<S>, TlsError> {
        let connector = TlsConnector::from(self.config.current());
        let handshake = connector.connect(server_name(host)?, stream);
        match tokio::time::timeout(HANDSHAKE_WITHIN, handshake).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(source)) => Err(TlsError::Handshake {
                host: host.to_owned(),
                source,
            }),
            Err(_) => Err(TlsError::Late {
                host: host.to_owned(),
                limit: HANDSHAKE_WITHIN,
            }),
        }
    }
}

/// Reads a host as URLs have it: an address of version 6 may be in brackets.
fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::Host {
        host: host.chars().take(200).collect(),
    })
}

/// Finds out whether a client can use what the files hold.
///
/// # Errors
///
/// Fails where it cannot.
pub(crate) fn check_client(credentials: &Credentials) -> Result<(), TlsError> {
    client_config(credentials).map(drop)
}

fn client_config(credentials: &Credentials) -> Result<ClientConfig, TlsError> {
    let roots = match &credentials.roots {
        Some(roots) => root_store(roots),
        None => RootCertStore {
            roots: webpki_roots::TLS_SERVER_ROOTS.to_vec(),
        },
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Identity)?
        .with_root_certificates(roots);
    let mut config = match &credentials.identity {
        Some(identity) => builder
            .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
            .map_err(TlsError::Identity)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![HTTP.to_vec()];
    Ok(config)
}
