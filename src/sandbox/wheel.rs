//! Python packages to add to the guest.

use std::io::Read as _;
use std::path::Path;

use super::error::SandboxError;

/// The most bytes of one wheel: what its files, and it beside them, fit into the guest's file
/// system with.
const MAX_WHEEL: u64 = 32 << 20;

/// A wheel as it is on disk: its bytes are the guest's to unpack.
#[derive(Debug)]
pub(super) struct Wheel {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

impl Wheel {
    /// Reads a wheel, if its name is that of one for this Python.
    pub(super) fn read(path: &Path) -> Result<Self, SandboxError> {
        let refused = |reason: String| SandboxError::Wheel {
            path: path.to_owned(),
            reason,
        };
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| refused("it has no file name in UTF-8".to_owned()))?;
        check_name(name).map_err(refused)?;
        let mut bytes = Vec::new();
        let read = fs_err::File::open(path)
            .and_then(|file| file.take(MAX_WHEEL + 1).read_to_end(&mut bytes));
        read.map_err(|error| refused(format!("it cannot be read: {error}")))?;
        if bytes.len() as u64 > MAX_WHEEL {
            return Err(refused(format!("it is larger than {MAX_WHEEL} bytes")));
        }
        Ok(Self {
            name: name.to_owned(),
            bytes,
        })
    }
}

/// Checks a wheel's name, `NAME-VERSION(-BUILD)?-PYTHON-ABI-PLATFORM.whl`.
fn check_name(name: &str) -> Result<(), String> {
    let parts: Vec<_> = name
        .strip_suffix(".whl")
        .ok_or("its name does not end in `.whl`")?
        .split('-')
        .collect();
    let (5 | 6, Some([python, abi, platform])) = (parts.len(), parts.last_chunk()) else {
        return Err("its name is not `NAME-VERSION-PYTHON-ABI-PLATFORM.whl`".to_owned());
    };
    if *platform != "any" || !abi.split('.').any(|tag| tag == "none") {
        return Err(format!(
            "it is for `{abi}` on `{platform}`; the sandbox runs pure Python only (`none-any`)"
        ));
    }
    if !python
        .split('.')
        .any(|tag| matches!(tag, "py3" | "py313" | "cp313"))
    {
        return Err(format!("it is for `{python}`, not for Python 3.13"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("six-1.17.0-py2.py3-none-any.whl", "")]
    #[case("a-1-2-py3-none-any.whl", "")]
    #[case("numpy-2.0-cp313-cp313-linux_x86_64.whl", "pure Python")]
    #[case("a-1-py2-none-any.whl", "`py2`")]
    #[case("a-1-py3-none.whl", "NAME-VERSION")]
    #[case("a.tar.gz", ".whl")]
    fn names_are_checked(#[case] name: &str, #[case] fault: &str) {
        match check_name(name) {
            Ok(()) => assert!(fault.is_empty(), "{name} was taken"),
            Err(reason) => assert!(!fault.is_empty() && reason.contains(fault), "{reason}"),
        }
    }
}
