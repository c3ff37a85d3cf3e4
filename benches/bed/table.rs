//! How figures are told: a table of plain text, and the few numbers that stand for many.

use std::fmt;

/// A title, a head, rows, and remarks below.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
    remarks: Vec<String>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, head: &[&str]) -> Self {
        let head = head.iter().map(|&cell| cell.to_owned()).collect();
        Table { title: title.into(), rows: vec![head], remarks: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn remark(&mut self, remark: impl Into<String>) {
        self.remarks.push(remark.into());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.title)?;
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |at: usize| self.rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
        for row in &self.rows {
            write!(out, "\n ")?;
            for (at, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                // Names to the left, figures to the right.
                if at == 0 { write!(out, " {cell:<width$}")? } else { write!(out, "  {cell:>width$}")? }
            }
        }
        for remark in &self.remarks {
            write!(out, "\n  {remark}")?;
        }
        Ok(())
    }
}

/// The value below which a share of all values lies.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of a short list")]
    let at = (last as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Each value as a multiple of the best of those it is compared with.
pub(crate) struct Ratios(f64);

impl Ratios {
    /// `figures` are values, each with whether it is one of ours, which we are not compared with.
    pub(crate) fn to_best(figures: impl IntoIterator<Item = (f64, bool)>) -> Self {
        let others = figures.into_iter().filter(|(value, ours)| !ours && value.is_finite());
        Ratios(others.map(|(value, _)| value).fold(f64::INFINITY, f64::min))
    }

    pub(crate) fn of(&self, value: f64) -> String {
        if self.0.is_finite() && self.0 > 0.0 { format!("{:.2}", value / self.0) } else { "-".to_owned() }
    }
}
