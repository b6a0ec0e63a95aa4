//! Which values of a `task.toml` are taken: names, hosts, sizes and paths.

use std::net::{IpAddr, Ipv6Addr};

use super::config::{Artifact, ArtifactConfig, McpServer, NetworkMode, TpuSpec};

/// A value that is refused.
#[derive(Debug)]
pub(super) struct Fault {
    /// The key, from the top of the file.
    pub(super) key: String,
    /// What is wrong and what would do, to follow the key in a sentence.
    pub(super) reason: String,
}

impl Fault {
    pub(super) fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            reason: reason.into(),
        }
    }
}

fn is_word(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Takes `owner/name`.
pub(super) fn package_name(key: &str, name: &str) -> Result<(), Fault> {
    let is_taken = name
        .split_once('/')
        .is_some_and(|(owner, name)| is_word(owner) && is_word(name));
    if is_taken && !name.contains("..") {
        return Ok(());
    }
    let reason = format!(
        "is `{name}`; make it `owner/name`, of letters, digits, `-`, `_` and `.`, without `..`"
    );
    Err(Fault::new(key, reason))
}

/// Takes the name of a service and trims it.
pub(super) fn service(key: &str, name: &str) -> Result<String, Fault> {
    let name = name.trim();
    if is_word(name) {
        return Ok(name.to_owned());
    }
    let reason = format!("is `{name}`; make it letters, digits, `-`, `_` and `.`");
    Err(Fault::new(key, reason))
}

/// Takes a name that is one folder on every system.
pub(super) fn step_name(key: &str, name: &str) -> Result<(), Fault> {
    let fault = |reason: &str| Err(Fault::new(key, format!("is `{name}`, which {reason}")));
    let stem = name
        .split('.')
        .next()
        .unwrap_or_default()
        .trim_end_matches(' ');
    let stem = stem.to_ascii_uppercase();
    let is_device = matches!(
        stem.as_str(),
        "CON" | "PRN" | "AUX" | "NUL" | "CONIN$" | "CONOUT$"
    ) || ["COM", "LPT"].iter().any(|kind| {
        let mut rest = stem.strip_prefix(kind).unwrap_or_default().chars();
        matches!(rest.next(), Some('1'..='9' | '¹' | '²' | '³')) && rest.next().is_none()
    });
    if name.trim().is_empty() || name == "." || name == ".." || name.ends_with(['.', ' ']) {
        return fault("is empty or ends in a dot or a space");
    }
    if name.contains(|letter: char| "<>:\"/\\|?*\u{7f}".contains(letter) || letter < ' ') {
        return fault("holds a separator or another character that folders cannot have");
    }
    if is_device {
        return fault("is a device on some systems");
    }
    if name.len() > 255 {
        return fault("is longer than 255 bytes");
    }
    Ok(())
}

/// Takes a network policy and spells its hosts alike.
pub(super) fn network(
    key: &str,
    mode: Option<NetworkMode>,
    hosts: &mut Option<Vec<String>>,
) -> Result<(), Fault> {
    let Some(hosts) = hosts else { return Ok(()) };
    let key = format!("{key}.allowed_hosts");
    for host in hosts.iter_mut() {
        *host = normal_host(host).map_err(|reason| Fault::new(&key, reason))?;
    }
    let is_empty_list = mode.is_some() && hosts.is_empty();
    if mode == Some(NetworkMode::Allowlist) || is_empty_list {
        return Ok(());
    }
    Err(Fault::new(
        key,
        "goes only with `network_mode = \"allowlist\"`",
    ))
}

fn normal_host(host: &str) -> Result<String, String> {
    let wrong = || {
        format!(
            "has `{host}`; make it a host name, `*.` and a host name, an IP address or a range of \
             them, without scheme, port or path"
        )
    };
    let lower = host.trim().to_lowercase();
    let lower = lower.trim_end_matches('.');
    if lower.is_empty() {
        return Err(wrong());
    }
    if let Some((address, prefix)) = lower.split_once('/') {
        return range(address, prefix).ok_or_else(wrong);
    }
    if lower.contains(':') {
        let address: Ipv6Addr = lower.parse().map_err(|_| wrong())?;
        return Ok(address.to_string());
    }
    let name = lower.strip_prefix("*.").unwrap_or(lower);
    if name != lower && name.parse::<IpAddr>().is_ok() {
        return Err(wrong());
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if name.split('.').all(is_label) {
        Ok(lower.to_owned())
    } else {
        Err(wrong())
    }
}

/// Reads a range of addresses without bits beyond its prefix.
fn range(address: &str, prefix: &str) -> Option<String> {
    let address: IpAddr = address.parse().ok()?;
    if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let prefix: u32 = prefix.parse().ok()?;
    let (bits, width) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    let rest = bits.checked_shl(prefix).unwrap_or_default();
    (prefix <= width && rest == 0).then(|| format!("{address}/{prefix}"))
}

/// Reads `2G`, `512M` or `64K` as MiB.
pub(super) fn mebibytes(key: &str, size: &str) -> Result<i64, Fault> {
    let text = size.trim().to_uppercase();
    let factor = match text.chars().next_back() {
        Some('G') => Some(1024.0),
        Some('M') => Some(1.0),
        Some('K') => Some(1.0 / 1024.0),
        _ => None,
    };
    let number: Option<f64> = text
        .get(..text.len().saturating_sub(1))
        .and_then(|number| number.trim().parse().ok());
    let mebibytes = factor.zip(number).map(|(factor, number)| number * factor);
    #[expect(clippy::cast_possible_truncation, reason = "it is in range")]
    mebibytes
        .filter(|size| (0.0..1e12).contains(size))
        .map(|size| size as i64)
        .ok_or_else(|| Fault::new(key, format!("is `{size}`; write it like `1G` or `512M`")))
}

/// Takes a shape like `2x4`.
pub(super) fn topology(key: &str, tpu: &mut TpuSpec) -> Result<(), Fault> {
    if tpu.kind.is_empty() {
        return Err(Fault::new(format!("{key}.type"), "is empty"));
    }
    let shape = tpu.topology.trim().to_owned();
    let is_axis = |axis: &str| {
        !axis.starts_with('0') && !axis.is_empty() && axis.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !shape.contains('x') || !shape.split('x').all(is_axis) {
        let reason = format!("is `{shape}`; write it like `2x4` or `2x2x1`");
        return Err(Fault::new(format!("{key}.topology"), reason));
    }
    tpu.topology = shape;
    Ok(())
}

/// Takes a tool server whose fields go with its transport.
pub(super) fn mcp_server(key: &str, server: &mut McpServer) -> Result<(), Fault> {
    if server.transport == "http" {
        server.transport = "streamable-http".to_owned();
    }
    let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let (needed, is_there) = match server.transport.as_str() {
        "stdio" => ("command", is_given(&server.command)),
        "sse" | "streamable-http" => ("url", is_given(&server.url)),
        other => {
            let reason = format!("is `{other}`; make it `stdio`, `sse` or `streamable-http`");
            return Err(Fault::new(format!("{key}.transport"), reason));
        }
    };
    if !is_there {
        let reason = format!("is missing, which `{}` needs", server.transport);
        return Err(Fault::new(format!("{key}.{needed}"), reason));
    }
    if server.transport == "stdio" && !server.headers.is_empty() {
        return Err(Fault::new(format!("{key}.headers"), "are for HTTP alone"));
    }
    for (name, value) in &server.headers {
        let is_token = !name.is_empty()
            && (name.bytes())
                .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+.^_`|~-".contains(&byte));
        if !is_token || value.contains(['\r', '\n']) {
            let reason = format!("has `{name}`, which is no header, or two lines for it");
            return Err(Fault::new(format!("{key}.headers"), reason));
        }
    }
    Ok(())
}

/// Takes paths that stay inside the folder that they are brought to.
pub(super) fn artifacts(key: &str, artifacts: &mut [Artifact]) -> Result<(), Fault> {
    for (index, artifact) in artifacts.iter_mut().enumerate() {
        let key = format!("{key}[{index}]");
        if let Artifact::Full(artifact) = artifact {
            full_artifact(&key, artifact)?;
        } else if has_parent(artifact.source()) {
            return Err(Fault::new(key, "holds `..`; give the path without it"));
        }
    }
    Ok(())
}

fn has_parent(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

fn full_artifact(key: &str, artifact: &mut ArtifactConfig) -> Result<(), Fault> {
    if has_parent(&artifact.source) {
        let reason = "holds `..`; give the path without it";
        return Err(Fault::new(format!("{key}.source"), reason));
    }
    if let Some(name) = &artifact.service {
        let name = service(&format!("{key}.service"), name)?;
        if name != "main" && !artifact.source.starts_with('/') {
            let reason = format!("is not absolute, which one of service `{name}` has to be");
            return Err(Fault::new(format!("{key}.source"), reason));
        }
        artifact.service = Some(name);
    }
    artifact.destination = artifact.destination.take().filter(|path| !path.is_empty());
    if let Some(path) = &artifact.destination {
        let says_nothing = path.split('/').all(|part| part.is_empty() || part == ".");
        if path.starts_with('/') || path.contains('\\') || has_parent(path) || says_nothing {
            let reason = format!("is `{path}`; make it relative, with `/` and without `..`");
            return Err(Fault::new(format!("{key}.destination"), reason));
        }
        if path.trim_end_matches('/') == "manifest.json" {
            let reason = "is `manifest.json`, which lists the artifacts; choose another name";
            return Err(Fault::new(format!("{key}.destination"), reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("Example.org.", Some("example.org"))]
    #[case("*.Example.com", Some("*.example.com"))]
    #[case("10.0.0.0/8", Some("10.0.0.0/8"))]
    #[case("2001:DB8:0::1", Some("2001:db8::1"))]
    #[case("2001:db8::/32", Some("2001:db8::/32"))]
    #[case("0.0.0.0/0", Some("0.0.0.0/0"))]
    #[case("10.0.0.1/8", None)]
    #[case("10.0.0.0/33", None)]
    #[case("10.0.0.0/+8", None)]
    #[case("*.10.0.0.1", None)]
    #[case("a.*.com", None)]
    #[case("https://example.org/", None)]
    #[case("example.org:443", None)]
    #[case("[::1]", None)]
    #[case("-a.com", None)]
    #[case("a..com", None)]
    #[case(" . ", None)]
    fn hosts_are_spelled_alike(#[case] host: &str, #[case] expected: Option<&str>) {
        assert_eq!(normal_host(host).ok().as_deref(), expected);
    }

    #[rstest]
    #[case("scaffold", true)]
    #[case("a b", true)]
    #[case("com1x", true)]
    #[case("", false)]
    #[case("..", false)]
    #[case("a/b", false)]
    #[case("a\nb", false)]
    #[case("a.", false)]
    #[case("nul.txt", false)]
    #[case("Com1", false)]
    fn steps_are_folders_everywhere(#[case] name: &str, #[case] is_taken: bool) {
        assert_eq!(step_name("steps[0].name", name).is_ok(), is_taken);
    }

    #[rstest]
    #[case("2G", Some(2048))]
    #[case(" 1.5g", Some(1536))]
    #[case("10240M", Some(10240))]
    #[case("2048K", Some(2))]
    #[case("2", None)]
    #[case("é", None)]
    #[case("nanG", None)]
    #[case("-1G", None)]
    fn sizes_are_in_mebibytes(#[case] size: &str, #[case] expected: Option<i64>) {
        assert_eq!(mebibytes("environment.memory", size).ok(), expected);
    }

    #[test]
    fn artifacts_stay_in_their_folder() {
        let artifact = |source: &str, destination: &str| {
            let mut artifacts = [Artifact::Full(ArtifactConfig {
                source: source.to_owned(),
                destination: Some(destination.to_owned()),
                exclude: Vec::new(),
                service: None,
            })];
            artifacts_taken(&mut artifacts)
        };
        artifact("/app/out", "out/a").unwrap();
        artifact("/app/out", "").unwrap();
        for (source, destination) in [
            ("/app/../etc", "a"),
            ("/app", "../a"),
            ("/app", "/a"),
            ("/app", "a\\b"),
            ("/app", "./"),
            ("/app", "manifest.json/"),
        ] {
            assert!(
                artifact(source, destination).is_err(),
                "{source} {destination}"
            );
        }
        let mut plain = [Artifact::Path("a/../../b".to_owned())];
        assert!(artifacts_taken(&mut plain).is_err());
    }

    fn artifacts_taken(list: &mut [Artifact]) -> Result<(), Fault> {
        artifacts("artifacts", list)
    }
}
