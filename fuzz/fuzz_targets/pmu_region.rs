//! Fuzzes the memory region of the modelled PMU: an accepted header is within bounds, and counts and samples are read only from
//! inside the region.

#![no_main]

use std::sync::atomic::{AtomicU8, AtomicU64};

use homenode_formats::pmu_region::{HEADER_WORDS, Layout, Page};
use libfuzzer_sys::fuzz_target;

/// Size of the largest region that is built here.
const BYTES_MAX: u64 = 4 << 20;

fuzz_target!(|input: (Vec<u64>, Vec<u64>, u8, bool)| {
    let (figures, words, tag, is_whole) = input;
    let figure = |at: usize| figures.get(at).copied().unwrap_or(1);
    let mut header = [0; HEADER_WORDS];
    header
        .iter_mut()
        .zip(&figures)
        .for_each(|(word, figure)| *word = *figure);
    let _ = Layout::parse(header, figure(7));
    // A header that is nearly valid: it is built from the input's figures, and only the mapped size may contradict it.
    let (cpus, tags, frames) = (figure(0) % 5000, figure(1) % 300, figure(2) % (1 << 21));
    let (line_bytes, samples) = (figure(3) % 5000, 1 << (figure(4) % 22));
    let layout = Layout {
        cpus,
        tags,
        frames,
        line_bytes,
        samples,
    };
    let mapped = if is_whole { layout.bytes() } else { figure(5) };
    let Ok(parsed) = Layout::parse(layout.header(), mapped) else {
        return;
    };
    assert_eq!(parsed, layout);
    assert!(layout.bytes() <= mapped && layout.tags_at() < layout.bytes());
    if layout.bytes() > BYTES_MAX {
        return;
    }
    let region: Vec<AtomicU64> = (0..layout.tags_at() / 8)
        .map(|at| AtomicU64::new(words.get(at as usize % words.len().max(1)).copied().unwrap_or(0)))
        .collect();
    let tags: Vec<AtomicU8> = (0..layout.bytes() - layout.tags_at())
        .map(|_| AtomicU8::new(tag))
        .collect();
    let page = Page::new(layout, &region, &tags);
    for cpu in [0, layout.cpus - 1, layout.cpus, u64::MAX] {
        let known = cpu < layout.cpus;
        assert_eq!(page.instructions_of(cpu).is_some(), known);
        assert!(known || page.counts(cpu, tag).is_none());
        if known {
            let mut since = figure(6);
            let taken = page.take_samples(cpu, &mut since);
            assert!(taken.samples.len() as u64 <= layout.samples);
        }
    }
    let _ = page.tag(figure(8));
});
