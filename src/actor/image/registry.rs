//! Whether a registry has an image, by the distribution API: a HEAD of its manifest.

use std::time::Duration;

use ureq::http::{StatusCode, header};

use super::ImageReference;
use crate::actor::ActorError;

/// The most of a token that is read.
const MAX_TOKEN: u64 = 64 << 10;
/// What manifests are of.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, \
     application/vnd.docker.distribution.manifest.v2+json";

/// How registries are asked.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryOptions {
    /// Whether they are asked without TLS, such as one of the cluster's own.
    pub plain_http: bool,
    /// A user and a password, which are told to the registry itself alone.
    pub credentials: Option<(String, String)>,
    /// How long an answer may take.
    pub timeout: Duration,
}

impl Default for RegistryOptions {
    /// TLS, no credentials, 30 s.
    fn default() -> Self {
        Self {
            plain_http: false,
            credentials: None,
            timeout: Duration::from_secs(30),
        }
    }
}

impl std::fmt::Debug for RegistryOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryOptions")
            .field("plain_http", &self.plain_http)
            .field("user", &self.credentials.as_ref().map(|(user, _)| user))
            .field("timeout", &self.timeout)
            .finish()
    }
}

/// Asks registries for images.
#[derive(Debug)]
pub struct Registry {
    options: RegistryOptions,
    agent: ureq::Agent,
}

impl Registry {
    /// Returns a client.
    #[must_use]
    pub fn new(options: RegistryOptions) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(options.timeout))
            // Elsewhere is another registry.
            .max_redirects(0)
            .build();
        Self {
            options,
            agent: ureq::Agent::new_with_config(config),
        }
    }

    /// Whether the image is there.
    ///
    /// # Errors
    ///
    /// Fails where the registry cannot be asked or says neither yes nor no.
    pub fn has(&self, image: &ImageReference) -> Result<bool, ActorError> {
        let scheme = if self.options.plain_http {
            "http"
        } else {
            "https"
        };
        let url = format!(
            "{scheme}://{}/v2/{}/manifests/{}",
            image.registry(),
            image.repository(),
            image.reference()
        );
        let fault = |message: String| ActorError::Backend {
            activity: format!("asking the registry for `{}`", image.repository()),
            message,
        };
        let mut authorization = self.basic();
        // A registry that wants a token is asked again with one.
        for _ in 0..2 {
            let mut request = self.agent.head(&url).header(header::ACCEPT, MANIFESTS);
            if let Some(authorization) = &authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            let answer = request.call().map_err(|error| fault(error.to_string()))?;
            match answer.status() {
                StatusCode::OK => return Ok(true),
                StatusCode::NOT_FOUND => return Ok(false),
                StatusCode::UNAUTHORIZED => {
                    let challenge = answer.headers().get(header::WWW_AUTHENTICATE);
                    let challenge = challenge.and_then(|value| value.to_str().ok());
                    let token = challenge.and_then(Challenge::parse).map(|challenge| {
                        self.token(&challenge, image.registry())
                            .map_err(|error| fault(format!("its token: {error}")))
                    });
                    match token {
                        Some(token) => authorization = Some(format!("Bearer {}", token?)),
                        None => break,
                    }
                }
                status => return Err(fault(format!("it answers {status}"))),
            }
        }
        Err(fault(
            "it does not let us in; give it a user and a password".to_owned(),
        ))
    }

    fn basic(&self) -> Option<String> {
        let (user, password) = self.options.credentials.as_ref()?;
        Some(format!(
            "Basic {}",
            base64(format!("{user}:{password}").as_bytes())
        ))
    }

    /// Asks for a token; the credentials are told only to the registry's own host.
    fn token(&self, challenge: &Challenge, registry: &str) -> Result<String, String> {
        let realm =
            ureq::http::Uri::try_from(&challenge.realm).map_err(|error| error.to_string())?;
        if !self.options.plain_http && realm.scheme_str() != Some("https") {
            return Err(format!("`{}` is asked without TLS", challenge.realm));
        }
        let mut request = self.agent.get(&challenge.realm);
        for (name, value) in &challenge.query {
            request = request.query(name, value);
        }
        let is_own = realm
            .authority()
            .is_some_and(|host| host.as_str() == registry);
        if let (true, Some(basic)) = (is_own, self.basic()) {
            request = request.header(header::AUTHORIZATION, basic);
        }
        let mut answer = request.call().map_err(|error| error.to_string())?;
        if answer.status() != StatusCode::OK {
            return Err(format!("`{}` answers {}", challenge.realm, answer.status()));
        }
        let body = answer
            .body_mut()
            .with_config()
            .limit(MAX_TOKEN)
            .read_to_vec();
        let body = body.map_err(|error| error.to_string())?;
        let body: serde_json::Value =
            serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        let text = |name: &str| body[name].as_str();
        let token = text("token").or_else(|| text("access_token"));
        let is_plain = |token: &&str| token.bytes().all(|byte| byte.is_ascii_graphic());
        token
            .filter(is_plain)
            .map(str::to_owned)
            .ok_or_else(|| "there is none".to_owned())
    }
}

/// What a registry wants a token for, and where that is to be had.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    realm: String,
    query: Vec<(String, String)>,
}

impl Challenge {
    /// Reads `Bearer realm="…",service="…",scope="…"`.
    fn parse(text: &str) -> Option<Self> {
        let (scheme, mut rest) = text.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut query) = (None, Vec::new());
        while let Some((name, after)) = rest.trim_start_matches([',', ' ']).split_once("=\"") {
            let (value, after) = after.split_once('"')?;
            match name {
                "realm" => realm = Some(value.to_owned()),
                "service" | "scope" => query.push((name.to_owned(), value.to_owned())),
                _ => {}
            }
            rest = after;
        }
        Some(Self {
            realm: realm?,
            query,
        })
    }
}

/// Returns bytes in base64, with padding (RFC 4648).
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let mut bits = 0_u32;
        for place in 0..3 {
            bits = bits << 8 | u32::from(three.get(place).copied().unwrap_or(0));
        }
        for place in 0..4_usize {
            let digit = (bits >> (18 - 6 * place)) & 63;
            match place <= three.len() {
                true => text.push(char::from(DIGITS[digit as usize])),
                false => text.push('='),
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let text = "Bearer realm=\"https://auth.example.org/token\",service=\"r\", scope=\"repository:a/b:pull,push\"";
        let challenge = Challenge::parse(text).unwrap();
        assert_eq!(challenge.realm, "https://auth.example.org/token");
        let scope = ("scope".to_owned(), "repository:a/b:pull,push".to_owned());
        assert_eq!(challenge.query[1], scope);
        for text in [
            "",
            "Basic realm=\"x\"",
            "Bearer service=\"x\"",
            "Bearer realm=\"x",
        ] {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
    }

    /// The examples of RFC 4648, section 10.
    #[test]
    fn base64_is_that_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let options = RegistryOptions {
            credentials: Some(("user".to_owned(), "secret".to_owned())),
            ..RegistryOptions::default()
        };
        assert!(!format!("{options:?}").contains("secret"));
        assert!(!format!("{:?}", Registry::new(options)).contains("secret"));
    }
}
