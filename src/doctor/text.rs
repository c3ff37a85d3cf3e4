//! The page for people: what happens by default, then what each containment would promise, then what was found.

use super::promise::{CASES, Promise, WAYS};
use super::{Examination, Finding};

/// How wide the names of the cases are.
const CASE: usize = 18;

/// One screen.
pub(super) fn page(examination: &Examination) -> String {
    let Examination { kernel, auto, findings, promises, .. } = examination;
    let mut page = format!("Linux {kernel}; --containment auto is: {auto}\n\n");
    let of_auto = promises.iter().filter(|promise| promise.containment == *auto);
    for Promise { case, promise, by, .. } in of_auto {
        page += &format!("{case:CASE$} {}: {by}\n", promise.text());
    }
    page += &table(promises);
    page.push('\n');
    for Finding { name, available, detail } in findings {
        let mark = if *available { "yes" } else { "no" };
        page += &format!("{mark:3} {name:18} {detail}\n");
    }
    page
}

fn table(promises: &[Promise]) -> String {
    let find = |case, way| promises.iter().find(|promise| promise.case == case && promise.containment == way);
    let ways: Vec<_> = WAYS.into_iter().filter(|way| find(CASES[0], *way).is_some()).collect();
    let mut lines = vec![ways.iter().fold(format!("{:CASE$}", ""), |line, way| line + &format!(" {way:20}"))];
    for case in CASES {
        lines.push(
            ways.iter()
                .filter_map(|way| find(case, *way))
                .fold(format!("{case:CASE$}"), |line, promise| line + &format!(" {:20}", promise.promise.short())),
        );
    }
    lines.iter().fold("\n".to_owned(), |text, line| text + line.trim_end() + "\n")
}
