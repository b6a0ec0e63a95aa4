//! Our own programs in an actor: `helper.c` and `mend.c`, built by `build.sh`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::{ActorCommand, ActorSpec};

/// Where they are in an actor: directly below the root, since a guest may rename the folder above where something
/// is mounted, and then no command could be started any more.
pub(super) const GUEST_FOLDER: &str = "/.wardian";
/// The one that everything starts with.
pub(super) const HELPER: &str = "/.wardian/helper";

const HELPER_PROGRAM: &[u8] = include_bytes!("helper-x86_64");
const MEND_LIBRARY: &[u8] = include_bytes!("mend-x86_64.so");

/// Returns the arguments that run a command: the helper's, which enters the folder and becomes the program.
pub(super) fn exec(spec: &ActorSpec, command: &ActorCommand) -> Vec<String> {
    let cwd = command.cwd.as_deref().unwrap_or(&spec.workdir);
    let helper = [HELPER, "exec"].map(str::to_owned);
    let cwd = cwd.to_string_lossy().into_owned();
    let argv = command.argv.iter().cloned();
    helper.into_iter().chain([cwd]).chain(argv).collect()
}

/// Writes them into the folder of a run, and returns the folder that actors are shown.
///
/// # Errors
///
/// Fails where they cannot be written.
pub(super) fn write(run: &Path) -> std::io::Result<PathBuf> {
    let folder = run.join("guest");
    fs::create_dir(&folder)?;
    for (name, bytes) in [("helper", HELPER_PROGRAM), ("mend.so", MEND_LIBRARY)] {
        let path = folder.join(name);
        fs::write(&path, bytes)?;
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The committed programs are what their sources give, by the compiler that `build.sh` names; by
    /// another one they are built, at least.
    #[test]
    fn the_programs_are_built_from_their_sources() {
        let out = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/actor/guest/build.sh");
        let run = |program: &Path, argument: &str| {
            let output = std::process::Command::new(program).arg(argument).output();
            let output = output.unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        run(&script, out.path().to_str().unwrap());
        let compiler = run(Path::new("cc"), "--version");
        let is_same = compiler.contains("(Debian 12.2.0-14");
        for (name, committed) in [
            ("helper-x86_64", HELPER_PROGRAM),
            ("mend-x86_64.so", MEND_LIBRARY),
        ] {
            let built = fs::read(out.path().join(name)).unwrap();
            assert!(
                !is_same || built == committed,
                "`{name}` is not what `build.sh` builds"
            );
        }
    }
}
