//! Compares pictures of screens with the committed ones.
//!
//! A picture stores the mean colour of each square of 4 by 4 pixels. Letters that another version of the browser draws
//! differently change it little, but a missing element changes a whole patch.

use std::path::PathBuf;

/// Side of a square, in pixels.
const SQUARE: usize = 4;
/// Side of a patch, in squares; that is 32 pixels.
const PATCH: usize = 8;
/// Mean difference of colour values, out of 255, above which a patch counts as different.
const OTHER: f64 = 5.0;

/// Colours of squares, three bytes each, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    width: usize,
    height: usize,
    squares: Vec<u8>,
}

impl Picture {
    /// Creates a picture from a screenshot.
    pub fn of(png: &[u8]) -> Picture {
        let (width, height, pixels, channels) = decoded(png);
        let (across, down) = (width / SQUARE, height / SQUARE);
        let mut squares = Vec::with_capacity(across * down * 3);
        for (y, x) in (0..down).flat_map(|y| (0..across).map(move |x| (y, x))) {
            for channel in 0..3 {
                let inside = (0..SQUARE * SQUARE).map(|at| {
                    let (row, column) = (y * SQUARE + at / SQUARE, x * SQUARE + at % SQUARE);
                    usize::from(pixels[(row * width + column) * channels + channel])
                });
                squares.push((inside.sum::<usize>() / (SQUARE * SQUARE)) as u8);
            }
        }
        Picture {
            width: across,
            height: down,
            squares,
        }
    }

    /// Returns the committed picture with this name, if there is one.
    pub fn committed(name: &str) -> Option<Picture> {
        let (width, height, squares, channels) = decoded(&std::fs::read(path(name)).ok()?);
        assert_eq!(channels, 3);
        Some(Picture {
            width,
            height,
            squares,
        })
    }

    /// Writes the picture under this name.
    pub fn keep(&self, name: &str) {
        std::fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        let file = std::fs::File::create(path(name)).unwrap();
        let mut encoder = png::Encoder::new(file, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_compression(png::Compression::High);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&self.squares).unwrap();
    }

    /// Returns the patches that differ: the origin of each in pixels, and the size of the difference.
    pub fn others(&self, than: &Picture) -> Vec<(usize, usize, f64)> {
        assert_eq!((self.width, self.height), (than.width, than.height));
        let patches = (0..self.height)
            .step_by(PATCH / 2)
            .flat_map(|y| (0..self.width).step_by(PATCH / 2).map(move |x| (x, y)));
        let difference = |(x, y): (usize, usize)| {
            let (right, bottom) = ((x + PATCH).min(self.width), (y + PATCH).min(self.height));
            let rows = (y..bottom).map(|row| (row * self.width + x) * 3..(row * self.width + right) * 3);
            let bytes = rows.flat_map(|row| self.squares[row.clone()].iter().zip(&than.squares[row]));
            let (count, sum) = bytes.fold((0, 0), |(count, sum), (a, b)| {
                (count + 1, sum + u64::from(a.abs_diff(*b)))
            });
            (x * SQUARE, y * SQUARE, sum as f64 / f64::from(count))
        };
        patches
            .map(difference)
            .filter(|(.., difference)| *difference > OTHER)
            .collect()
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/peers/page/screens/{name}.png"))
}

/// Decodes a PNG. Returns width, height, bytes, and bytes per pixel.
fn decoded(bytes: &[u8]) -> (usize, usize, Vec<u8>, usize) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes))
        .read_info()
        .unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let channels = info.color_type.samples();
    assert!(info.bit_depth == png::BitDepth::Eight && channels >= 3);
    (info.width as usize, info.height as usize, pixels, channels)
}
