//! The progress line of long commands.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytesize::ByteSize;

use super::printer::Printer;
use crate::hub::{Download, watch_downloads};

/// Redraws one line on a terminal; elsewhere prints a line now and then.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    printer: &'a Printer,
    label: &'static str,
    total: usize,
    /// When time is counted from, and what was done then: the start, or where a run goes on, says nothing of the rest.
    since: Option<(Instant, usize)>,
    last_line: Option<Instant>,
}

/// Time between drawings of the line on a terminal.
const REDRAW_INTERVAL: Duration = Duration::from_millis(50);
/// Characters of the bar.
const BAR_WIDTH: usize = 20;

/// Time between lines where the terminal cannot be redrawn.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

impl<'a> Progress<'a> {
    pub(super) fn new(printer: &'a Printer, label: &'static str, total: usize) -> Self {
        Self {
            printer,
            label,
            total,
            since: None,
            last_line: None,
        }
    }

    /// Shows that `done` of the total are done, with `detail` behind it.
    pub(super) fn update(&mut self, done: usize, detail: &str) {
        let left = self.time_left(done);
        let line = || format!("{} {done}/{} {detail} {left}", self.label, self.total);
        if self.printer.is_live() {
            // More often than this nobody sees it.
            let is_due = self
                .last_line
                .is_none_or(|last| last.elapsed() >= REDRAW_INTERVAL);
            if is_due || done == self.total {
                self.last_line = Some(Instant::now());
                self.printer
                    .redraw(&format!("{} {}", bar(done, self.total), line().trim_end()));
            }
        } else if done == self.total
            || self
                .last_line
                .is_none_or(|last| last.elapsed() >= LINE_INTERVAL)
        {
            self.printer.note(line().trim_end());
            self.last_line = Some(Instant::now());
        }
    }

    /// Counts time from now on for what follows step `done`: measuring takes time that steps do
    /// not.
    pub(super) fn restart_after(&mut self, done: usize) {
        self.since = Some((Instant::now(), done));
    }

    /// Clears the line.
    pub(super) fn finish(&self) {
        self.printer.redraw("");
    }

    fn time_left(&mut self, done: usize) -> String {
        let &mut (started, first) = self.since.get_or_insert_with(|| (Instant::now(), done));
        // The first moments say nothing about the rest.
        let is_early = started.elapsed() < Duration::from_secs(1);
        if done <= first || done >= self.total || is_early {
            return String::new();
        }
        let done_share = f64::from(u32::try_from(done - first).unwrap_or(u32::MAX));
        let left = f64::from(u32::try_from(self.total - done).unwrap_or(u32::MAX));
        let seconds = started.elapsed().as_secs_f64() / done_share * left;
        format!(
            "· {} left",
            human_duration(Duration::from_secs_f64(seconds))
        )
    }
}

/// Shows downloads, whoever begins them: on a terminal as a bar, elsewhere as a line now and then.
pub(super) fn show_downloads(printer: &Printer) {
    let printer = printer.clone();
    let shown: Mutex<Option<Instant>> = Mutex::default();
    watch_downloads(move |download| {
        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        let interval = match printer.is_live() {
            true => REDRAW_INTERVAL,
            false => LINE_INTERVAL,
        };
        let is_done = download.done >= download.total;
        if shown.is_some_and(|shown| shown.elapsed() < interval) && !is_done {
            return;
        }
        if printer.is_live() {
            let line = describe(download);
            printer.redraw(if is_done { "" } else { &line });
        } else if shown.is_some() && !is_done {
            // What is small is there before there is a need for words.
            printer.note(&describe(download));
        }
        *shown = (!is_done).then(Instant::now);
    });
}

fn describe(download: Download<'_>) -> String {
    let Download { file, done, total } = download;
    let share = |bytes: u64| usize::try_from(bytes >> 10).unwrap_or(usize::MAX);
    let bar = bar(share(done), share(total));
    let (done, total) = (ByteSize(done), ByteSize(total));
    format!("{bar} downloading {file} {done}/{total}")
}

/// Returns a bar of which a share is filled.
fn bar(done: usize, total: usize) -> String {
    let filled = BAR_WIDTH.saturating_mul(done.min(total)) / total.max(1);
    format!("[{}{}]", "#".repeat(filled), "-".repeat(BAR_WIDTH - filled))
}

/// Returns a duration as `1 h 02 min`, `3 min 20 s` or `12 s`.
pub(super) fn human_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

/// Returns a number with its noun: `1 task`, `2 tasks`.
pub(super) fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_kind_is_singular() {
        let found = [0, 1, 2].map(|count| counted(count, "held-out task"));
        assert_eq!(
            found,
            ["0 held-out tasks", "1 held-out task", "2 held-out tasks"]
        );
    }

    #[test]
    fn a_bar_fills() {
        assert_eq!(bar(0, 0), format!("[{}]", "-".repeat(20)));
        assert_eq!(bar(1, 4), format!("[{}{}]", "#".repeat(5), "-".repeat(15)));
        assert_eq!(bar(4, 4), format!("[{}]", "#".repeat(20)));
    }

    #[test]
    fn a_download_says_how_far_it_is() {
        let download = Download {
            file: "model.safetensors",
            done: 1 << 20,
            total: 4 << 20,
        };
        let shown = describe(download);
        assert!(
            shown.starts_with("[#####-----") && shown.contains("1.0 MiB/4.0 MiB"),
            "{shown}"
        );
    }

    #[test]
    fn what_was_done_before_took_no_time() {
        let printer = Printer::new(true);
        let mut progress = Progress::new(&printer, "step", 25);
        assert_eq!(progress.time_left(20), "");
        let Some((started, first)) = &mut progress.since else {
            unreachable!("time is counted from the first step on");
        };
        assert_eq!(*first, 20);
        *started -= Duration::from_secs(10);
        assert_eq!(progress.time_left(21), "· 40 s left");
    }

    #[test]
    fn durations_read_well() {
        let shown = |seconds| human_duration(Duration::from_secs(seconds));
        assert_eq!(shown(7), "7 s");
        assert_eq!(shown(200), "3 min 20 s");
        assert_eq!(shown(3720), "1 h 02 min");
    }
}
