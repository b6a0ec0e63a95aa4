//! The clocks: whether they run, and how far the system's is from a server's.

use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;

use super::Scope;
use super::finding::Finding;

/// This program is younger than that, so no right clock is before it: 2025-01-01.
const BUILT: u64 = 1_735_689_600;
/// From here on certificates and tokens of a few minutes are refused.
const MOST_SKEW: Duration = Duration::from_secs(120);
/// How long the clocks are watched.
const WATCH: Duration = Duration::from_millis(50);

pub(super) fn check(_scope: &Scope) -> Vec<Finding> {
    let (began, time) = (Instant::now(), SystemTime::now());
    std::thread::sleep(WATCH);
    let (steady, now) = (began.elapsed(), SystemTime::now());
    vec![judge(steady, time, now)]
}

/// Judges how far the steady clock went while the system's went from one time to another.
fn judge(steady: Duration, before: SystemTime, after: SystemTime) -> Finding {
    const FIX: &str = "timedatectl set-ntp true";
    let time = after.duration_since(SystemTime::UNIX_EPOCH);
    if !time.is_ok_and(|time| time.as_secs() >= BUILT) {
        let about = format!(
            "the system's clock says {}, before this program was made",
            shown(after)
        );
        return Finding::wrong("clock", about, FIX);
    }
    if steady < WATCH {
        let about =
            format!("the steady clock went {steady:?} in {WATCH:?}: no timeout can be kept");
        return Finding::wrong(
            "clock",
            about,
            "restart the machine, or its virtual machine",
        );
    }
    let Ok(went) = after.duration_since(before) else {
        return Finding::missing(
            "clock",
            false,
            "the system's clock was set back just now",
            FIX,
        );
    };
    if went.abs_diff(steady) > Duration::from_secs(1) {
        let about = format!("the system's clock went {went:?} in {steady:?}");
        return Finding::missing("clock", false, about, FIX);
    }
    Finding::fine("clock", format!("the system's clock says {}", shown(after)))
}

/// Compares the time of a server's answer, its `Date`, with ours.
pub(super) fn compare(server: &str, date: &str, now: SystemTime) -> Finding {
    let theirs = jiff::fmt::rfc2822::parse(date).map(|time| time.timestamp());
    let (Ok(theirs), Ok(ours)) = (theirs, Timestamp::try_from(now)) else {
        return Finding::note("clock", format!("`{server}` says no time that can be read"));
    };
    let ahead = ours.as_second() - theirs.as_second();
    let about = format!(
        "the system's clock is {} s {} that of `{server}`",
        ahead.unsigned_abs(),
        if ahead < 0 { "behind" } else { "ahead of" }
    );
    match ahead.unsigned_abs() > MOST_SKEW.as_secs() {
        true => Finding::wrong("clock", about, "timedatectl set-ntp true"),
        false => Finding::fine("clock", about),
    }
}

fn shown(time: SystemTime) -> String {
    Timestamp::try_from(time).map_or_else(
        |_| "a time before all calendars".to_owned(),
        |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn clocks_that_stand_still_jump_or_are_of_another_age_are_found() {
        let now = BUILT + 1000;
        assert_eq!(judge(WATCH, at(now), at(now)).state, State::Fine);
        assert_eq!(judge(Duration::ZERO, at(now), at(now)).state, State::Wrong);
        assert_eq!(judge(WATCH, at(now), at(now - 5)).state, State::Note);
        assert_eq!(judge(WATCH, at(now), at(now + 60)).state, State::Note);
        let old = judge(WATCH, at(7), at(7));
        assert_eq!(old.state, State::Wrong);
        assert!(old.about.contains("1970-01-01"), "{old:?}");
    }

    #[test]
    fn a_server_with_another_time_is_told_of() {
        // 784111777 is the example of RFC 9110, section 5.6.7.
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        let compared = |now| compare("hub", date, at(now));
        assert_eq!(compared(784_111_780).state, State::Fine);
        let ahead = compared(784_111_777 + 600);
        assert_eq!(ahead.state, State::Wrong);
        assert!(
            ahead.about.contains("600 s ahead of that of `hub`"),
            "{ahead:?}"
        );
        assert!(compared(784_111_777 - 600).about.contains("600 s behind"));
        assert_eq!(compare("hub", "yesterday", at(0)).state, State::Note);
    }
}
