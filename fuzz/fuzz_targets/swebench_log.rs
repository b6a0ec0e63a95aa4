//! The log of tests, in which a policy's program may have printed anything.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wardian::grader::swebench::{EvalLog, LogParser, Markers};

const PARSERS: [LogParser; 7] = [
    LogParser::Pytest,
    LogParser::PytestOptions,
    LogParser::PytestV2,
    LogParser::Django,
    LogParser::Seaborn,
    LogParser::Sympy,
    LogParser::Matplotlib,
];

fuzz_target!(|log: &str| {
    let markers = Markers::with_nonce("n");
    let marked = format!("{}\n{log}\n{}\n{}: 0\n", markers.start, markers.end, markers.exit);
    for parser in PARSERS {
        // What stands between the marks is what the harness reads, whatever else is printed.
        let read = EvalLog::read(&marked, &markers, parser, Some(0));
        if let Ok(read) = read
            && !log.contains(&markers.start)
            && !log.contains(&markers.end)
        {
            let lines = format!("\n{log}\n").replace("\r\n", "\n").replace('\r', "\n");
            assert_eq!(read.tests, parser.parse(&lines));
        }
    }
});
