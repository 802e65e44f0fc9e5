//! Which characters of a text nobody sees, or are seen where they do not stand.

use std::ops::RangeInclusive;

/// What turns the direction of a text and what has no width or no shape, up to the block of tags.
const HIDDEN: [RangeInclusive<char>; 18] = [
    '\u{AD}'..='\u{AD}',
    '\u{34F}'..='\u{34F}',
    '\u{61C}'..='\u{61C}',
    '\u{115F}'..='\u{1160}',
    '\u{17B4}'..='\u{17B5}',
    '\u{180B}'..='\u{180F}',
    '\u{200B}'..='\u{200F}',
    '\u{2028}'..='\u{202E}',
    '\u{2060}'..='\u{206F}',
    '\u{3164}'..='\u{3164}',
    '\u{FE00}'..='\u{FE0F}',
    '\u{FEFF}'..='\u{FEFF}',
    '\u{FFA0}'..='\u{FFA0}',
    '\u{FFF0}'..='\u{FFFB}',
    '\u{13430}'..='\u{13440}',
    '\u{1BCA0}'..='\u{1BCA3}',
    '\u{1D173}'..='\u{1D17A}',
    '\u{E0000}'..='\u{E0FFF}',
];

/// Whether a character is shown as itself: no control character, none without a width or a shape,
/// and none that turns the direction of others.
pub(crate) fn is_visible(character: char) -> bool {
    !character.is_control() && !HIDDEN.iter().any(|hidden| hidden.contains(&character))
}
